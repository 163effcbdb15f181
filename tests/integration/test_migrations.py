"""Migrations on both databases: they can be undone and done again, and they make what the models say."""

from __future__ import annotations

from alembic import command
from sqlalchemy import inspect

from app.db import Base, Database, import_models
from app.migrate import migration_config, upgrade
from tests.factories import new_run


def described(database: Database) -> dict[str, object]:
    """Columns, keys and indexes of every table, as the database tells them."""
    inspector = inspect(database.engine)
    return {
        table: (
            [(column["name"], str(column["type"]), column["nullable"]) for column in inspector.get_columns(table)],
            inspector.get_pk_constraint(table)["constrained_columns"],
            sorted(index["name"] or "" for index in inspector.get_indexes(table)),
            sorted(key["referred_table"] for key in inspector.get_foreign_keys(table)),
        )
        for table in sorted(inspector.get_table_names())
    }


def test_down_and_up_again_makes_the_same_tables(database: Database) -> None:
    config = migration_config()
    config.attributes["database_url"] = database.url
    before = described(database)
    command.downgrade(config, "base")
    assert set(described(database)) == {"alembic_version"}
    upgrade(database.url)
    assert described(database) == before
    command.check(config)  # raises if the models and the revisions disagree


def test_a_migrated_database_equals_one_made_from_the_models(database: Database) -> None:
    import_models()
    migrated = described(database)
    del migrated["alembic_version"]
    config = migration_config()
    config.attributes["database_url"] = database.url
    command.downgrade(config, "base")
    Base.metadata.create_all(database.engine)
    made = described(database)
    del made["alembic_version"]
    assert made == migrated


def test_going_down_removes_tables_that_hold_rows(database: Database) -> None:
    new_run(database)
    config = migration_config()
    config.attributes["database_url"] = database.url
    command.downgrade(config, "base")
    assert set(described(database)) == {"alembic_version"}


def test_the_metadata_knows_every_table_of_the_migrations(database: Database) -> None:
    import_models()
    assert set(described(database)) == {*Base.metadata.tables, "alembic_version"}
