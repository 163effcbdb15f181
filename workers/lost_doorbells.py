"""Doorbells of workers that are gone. Nobody will ever hear them, and Redis keeps them until somebody deletes them.

A worker's row goes when it stops, or long after it has died, but its bell may be rung until then, and a little longer
by who has just read its name. So this looks for what there is in Redis, whatever left it there.
"""

from __future__ import annotations

from redis import Redis
from sqlalchemy import select

from app.db import Database
from app.fleet.models import Worker
from app.fleet.queues import WAKE

_BINDINGS = ("_kombu.binding.", "_kombu.binding_permanent.")
"""What Celery wrote down of each queue that was not on the default exchange."""
_AT_ONCE = 1000


def forget_lost_doorbells(client: Redis, database: Database) -> int:
    """Delete the queues of workers that have no row; returns how many keys. Redis is asked first: a worker has its row
    before anybody rings at it."""
    found = {
        name: worker_id
        for name in client.scan_iter(f"*{WAKE}*", count=_AT_ONCE)
        if (worker_id := _worker_of(name.decode()))
    }
    if not found:
        return 0
    with database.read() as session:
        known = set(session.scalars(select(Worker.id)))
    lost = [name for name, worker_id in found.items() if worker_id not in known]
    return int(client.delete(*lost)) if lost else 0


def _worker_of(name: str) -> str | None:
    """The worker whose queue the key is, or is about, if it is one's."""
    for prefix in _BINDINGS:
        name = name.removeprefix(prefix)
    return name.removeprefix(WAKE) if name.startswith(WAKE) else None
