"""What alembic runs for every command: which database, which tables."""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, NullPool, create_engine

from app.db import Base, import_models
from app.settings import get_settings

import_models()


def database_url() -> str:
    """The URL that `app.migrate` passes on, else the one in the settings."""
    return str(context.config.attributes.get("database_url") or get_settings().database_url)


def migrate(connection: Connection) -> None:
    """Run the revisions on an open connection. SQLite cannot alter tables: there they are copied (batch mode)."""
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        render_as_batch=connection.dialect.name == "sqlite",
        compare_type=True,
    )
    with context.begin_transaction():
        context.run_migrations()


def migrate_online() -> None:
    """Connect, or use the connection that a caller (a test) put into the configuration.

    The engine is a plain one: foreign keys are off in SQLite, or copying a table would
    delete the rows that point at it.
    """
    connection = context.config.attributes.get("connection")
    if connection is not None:
        migrate(connection)
        return
    with create_engine(database_url(), poolclass=NullPool).connect() as own:
        migrate(own)


def print_sql() -> None:
    """`alembic upgrade --sql`: print what would be done."""
    url = database_url()
    context.configure(
        url=url,
        target_metadata=Base.metadata,
        literal_binds=True,
        render_as_batch=url.startswith("sqlite"),
    )
    with context.begin_transaction():
        context.run_migrations()


if context.is_offline_mode():
    print_sql()
else:
    migrate_online()
