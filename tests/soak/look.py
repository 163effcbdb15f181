"""What processes hold at a moment: memory, open files, connections, threads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import psycopg
import redis

from tests.services import PostgresServer

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Look:
    """Named values at a time, in seconds since the beginning. `memory …` in MiB, the rest are counts."""

    at_s: float
    values: dict[str, float]


def look_at(at_s: float, roles: Mapping[str, int], postgres: PostgresServer, redis_url: str) -> Look:
    """Look at the processes of the roles, given by their ids, at Redis, and at the connections of Postgres.

    Memory is what belongs to a process alone (USS): shared libraries and mapped model files are not counted.
    """
    values: dict[str, float] = {}
    for role, pid in roles.items():
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        values[f"memory {role}"] = sum(one.memory_full_info().uss for one in family) / MIB
        values[f"files {role}"] = sum(one.num_fds() for one in family)
        values[f"connections {role}"] = sum(len(one.net_connections("inet")) for one in family)
        values[f"threads {role}"] = sum(one.num_threads() for one in family)
    with redis.Redis.from_url(redis_url) as client:
        values["memory redis"] = client.info("memory")["used_memory"] / MIB
        values["connections redis"] = client.info("clients")["connected_clients"]
        values["keys redis"] = client.dbsize()
    with psycopg.connect(f"postgresql://postgres@127.0.0.1:{postgres.port}/postgres", connect_timeout=5) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
        ).fetchone()
        values["connections postgres"] = row[0] if row else 0
    return Look(at_s, values)
