"""The database: engine, sessions, and the two column types that SQLite and Postgres disagree on.

`Database.read()` and `Database.write()` are the only ways to a session. On SQLite a write begins with BEGIN IMMEDIATE,
so that two writers queue instead of failing half-way; on Postgres both are plain transactions.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqlalchemy import DateTime, Engine, Float, create_engine, event
from sqlalchemy.engine import Dialect, make_url
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.orm import DeclarativeBase, Session
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator

from app.settings import get_settings

MODEL_MODULES = (
    "app.accounts.models",
    "app.sessions.models",
    "app.fleet.models",
    "app.runs.models",
    "app.checkpoints.models",
    "app.sampling.models",
    "app.custom_losses.models",
    "app.billing.models",
    "app.audit.models",
)
_NOTICE_DEATH = {
    "connect_timeout": 10,
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""After how long (seconds; the last one milliseconds) libpq gives up on a Postgres whose host has vanished. What
DATABASE_URL says itself counts."""


class Base(DeclarativeBase):
    """The declarative base of every table."""


class UtcDateTime(TypeDecorator[datetime]):
    """A timezone-aware datetime in UTC, also on SQLite, which stores none."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError("a naive datetime has no place in the database")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class database_clock(FunctionElement[float]):
    """Seconds since the epoch by the database's own clock: the only clock that decides about leases."""

    type = Float()
    inherit_cache = True


@compiles(database_clock, "sqlite")
def _clock_sqlite(element: database_clock, compiler: Any, **kw: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_clock, "postgresql")
def _clock_postgresql(element: database_clock, compiler: Any, **kw: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


def utc_now() -> datetime:
    """Now, timezone-aware; for what people read. Leases use `database_clock`."""
    return datetime.now(UTC)


def import_models() -> None:
    """Import every module that defines a table, so that `Base.metadata` is whole."""
    for name in MODEL_MODULES:
        importlib.import_module(name)


class Database:
    """One engine and the sessions made from it. Thread-safe."""

    def __init__(self, url: str, *, pool_size: int = 10) -> None:
        import_models()
        self.url = url
        self.is_sqlite = url.startswith("sqlite")
        self.engine = self._sqlite(url, pool_size) if self.is_sqlite else self._postgres(url, pool_size)
        self._write_engine = self.engine.execution_options(tinworks_write=True)

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session for reading."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session in one transaction: committed at the end of the block, rolled back if it raises."""
        with Session(self._write_engine, expire_on_commit=False) as session, session.begin():
            yield session

    def dispose(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    @staticmethod
    def _postgres(url: str, pool_size: int) -> Engine:
        settings = {name: value for name, value in _NOTICE_DEATH.items() if name not in make_url(url).query}
        return create_engine(
            url, pool_size=pool_size, max_overflow=pool_size, pool_pre_ping=True, connect_args=settings
        )

    @staticmethod
    def _sqlite(url: str, pool_size: int) -> Engine:
        path = make_url(url).database
        if path and path != ":memory:":
            Path(path).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(url, pool_size=pool_size, max_overflow=pool_size, connect_args={"timeout": 20})

        @event.listens_for(engine, "connect")
        def _configure(connection: Any, record: Any) -> None:
            connection.isolation_level = None  # transactions are ours, not the driver's
            cursor = connection.cursor()
            cursor.execute("PRAGMA journal_mode=WAL")
            cursor.execute("PRAGMA synchronous=NORMAL")
            cursor.execute("PRAGMA busy_timeout=20000")
            cursor.execute("PRAGMA foreign_keys=ON")
            cursor.close()

        @event.listens_for(engine, "begin")
        def _begin(connection: Any) -> None:
            write = connection.get_execution_options().get("tinworks_write", False)
            connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

        return engine


@lru_cache(maxsize=1)
def get_database() -> Database:
    """The database of this process."""
    return Database(get_settings().database_url)
