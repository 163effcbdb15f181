"""`tinworks migrate`: bring the database up to the newest revision, whoever else tries to at the same time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources

from alembic import command
from alembic.config import Config
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.engine import make_url

LOCK_ID = 0x54_49_4E_57  # "TINW"
RETRY_S = 0.5


def migration_config() -> Config:
    """Alembic's configuration for the migrations that are installed with Tinworks."""
    config = Config()
    config.set_main_option("script_location", str(resources.files("migrations")).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def upgrade(database_url: str, revision: str = "head") -> None:
    """Apply all migrations up to `revision`, if any are left. On Postgres several may try at once."""
    config = migration_config()
    config.attributes["database_url"] = database_url
    with _only_one(database_url):
        command.upgrade(config, revision)


@contextmanager
def _only_one(database_url: str) -> Iterator[None]:
    """Hold an advisory lock of Postgres; SQLite has its own.

    It belongs to a transaction, so that connection poolers are no obstacle, and is tried for, not waited for: a waiting
    statement would hold a snapshot, and CREATE INDEX CONCURRENTLY waits for those.
    """
    if not make_url(database_url).drivername.startswith("postgresql"):
        yield
        return
    engine = create_engine(database_url, poolclass=NullPool)
    with engine.connect() as connection:
        while not connection.scalar(text("SELECT pg_try_advisory_xact_lock(:id)"), {"id": LOCK_ID}):
            connection.rollback()
            time.sleep(RETRY_S)
        yield
