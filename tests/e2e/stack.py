"""What the services of this suite run on: SQLite and a folder each; or, with `TINWORKS_TEST_STACK=postgres-s3`, a
Postgres database and a bucket of SeaweedFS each, on servers that the suite starts. Redis is always a real one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.s3_server import S3Server, s3_server
from tests.services import PostgresServer, postgres_server

VARIABLE = "TINWORKS_TEST_STACK"
NAME = "postgres-s3"


@dataclass(frozen=True)
class Stack:
    """Running servers."""

    postgres: PostgresServer
    s3: S3Server

    def new_database(self) -> str:
        """The URL of an empty database."""
        return self.postgres.url(self.postgres.create())

    def new_bucket(self) -> dict[str, str]:
        """The variables that make a process use an empty bucket."""
        return self.s3.environment(self.s3.new_bucket())


_current: Stack | None = None


def current() -> Stack | None:
    """The servers that services have to use, if there are any."""
    return _current


@contextmanager
def running_stack(folder: Path) -> Iterator[None]:
    """Start the servers that the environment asks for."""
    global _current
    asked = os.environ.get(VARIABLE, "")
    assert asked in ("", NAME), f"{VARIABLE} may be {NAME} or unset, not {asked}"
    with ExitStack() as servers:
        if asked:
            _current = Stack(servers.enter_context(postgres_server()), servers.enter_context(s3_server(folder / "s3")))
        try:
            yield
        finally:
            _current = None
