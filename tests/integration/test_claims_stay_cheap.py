"""What the train loop asks a thousand times an hour uses an index, however long the log has grown."""

from __future__ import annotations

from sqlalchemy import event

from app.db import Database
from app.runs import log


def test_looking_for_work_never_scans_the_log(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    statements: list[tuple[str, tuple[object, ...]]] = []

    @event.listens_for(database.engine, "before_cursor_execute")
    def _remember(connection, cursor, statement, parameters, context, many) -> None:  # type: ignore[no-untyped-def]
        statements.append((statement, parameters))

    with database.read() as session:
        log.pending_runs(session, "pool")
        log.ready_operations(session, {"run": 5})
        log.is_finished(session, ["run:1"])
    queries = [(s, p) for s, p in statements if s.lstrip().upper().startswith("SELECT")]
    assert len(queries) == 3
    with database.read() as session:
        for statement, parameters in queries:
            raw = session.connection().exec_driver_sql("EXPLAIN QUERY PLAN " + statement, parameters)
            steps = [row[3] for row in raw]
            assert not [s for s in steps if s.startswith("SCAN") and "ix_operations_accepted" not in s], steps
            if "'accepted'" in statement:
                assert any("ix_operations_accepted" in step for step in steps), steps
    database.dispose()
