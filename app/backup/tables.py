"""Tables as files: a line of JSON per row, zstd-compressed, the same from SQLite and from Postgres.

So a backup of one can be restored into the other, and needs no client programs of a database.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson
import zstandard
from sqlalchemy import Connection, DateTime, LargeBinary, Table, func, insert, select, text
from sqlalchemy.sql.schema import Column

from app.db import Base, UtcDateTime

LEFT_OUT = frozenset({"workers", "reservations"})
"""Processes register themselves anew, and saves that are under way are done again."""
_ROWS_AT_ONCE = 500
Row = dict[str, Any]


def tables() -> list[Table]:
    """What is backed up, in an order in which rows can be inserted."""
    return [table for table in Base.metadata.sorted_tables if table.name not in LEFT_OUT]


def path_of(folder: Path, table: Table) -> Path:
    """The file of a table."""
    return folder / "tables" / f"{table.name}.jsonl.zst"


def dump(connection: Connection, table: Table, path: Path, *, see: Callable[[Row], None]) -> int:
    """Write all rows of a table, and show each to `see`; returns how many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    rows = connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(select(table))
    with zstandard.open(path, "wb") as file:
        for row in rows.mappings():
            values = {str(name): value for name, value in row.items()}
            see(values)
            file.write(orjson.dumps({name: _encoded(value) for name, value in values.items()}) + b"\n")
            count += 1
    return count


def _encoded(value: Any) -> Any:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def load(connection: Connection, table: Table, path: Path) -> int:
    """Insert the rows of a file; returns how many."""
    count = 0
    for rows in _portions(path):
        decoded = [{name: _decoded(table.c[name], value) for name, value in row.items()} for row in rows]
        connection.execute(insert(table), decoded)
        count += len(rows)
    _continue_numbers(connection, table)
    return count


def _portions(path: Path) -> Iterator[list[Row]]:
    rows: list[Row] = []
    with zstandard.open(path, "rb") as file:
        for line in io.BufferedReader(file):
            rows.append(orjson.loads(line))
            if len(rows) == _ROWS_AT_ONCE:
                yield rows
                rows = []
    if rows:
        yield rows


def _decoded(column: Column[Any], value: Any) -> Any:
    if value is None:
        return None
    if isinstance(column.type, LargeBinary):
        return base64.b64decode(value)
    if isinstance(column.type, UtcDateTime | DateTime):
        return datetime.fromisoformat(value)
    return value


def _continue_numbers(connection: Connection, table: Table) -> None:
    """Let Postgres number new rows from where the restored ones end."""
    column = table.autoincrement_column
    if column is None or connection.dialect.name != "postgresql":
        return
    sequence = connection.scalar(select(func.pg_get_serial_sequence(table.name, column.name)))
    highest = connection.scalar(select(func.max(column)))
    if sequence and highest:
        connection.execute(
            text("SELECT setval(CAST(:sequence AS regclass), :highest)"), {"sequence": sequence, "highest": highest}
        )
