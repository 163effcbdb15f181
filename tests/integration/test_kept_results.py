"""Results stay until their run has been quiet for long; of a run that never is, those of its last operations stay."""

from __future__ import annotations

from datetime import timedelta

import pytest
from sqlalchemy import event, select, update

from app.db import Database, utc_now
from app.runs import log
from app.runs.log import DONE, FAILED, Failure, Finished, Payload
from app.runs.models import Operation, Run
from app.runs.results import KEPT_BEHIND, prune_results
from tests.factories import add_operation, new_run

DAY = timedelta(hours=24)
LONG_AGO = timedelta(hours=25)


@pytest.fixture
def run(database: Database) -> Run:
    """A run that was asked for something long ago, for the last time."""
    return new_run(database, last_request_at=utc_now() - LONG_AGO)


def finish(database: Database, run: Run, *seq_ids: int, ago: timedelta, failure: Failure | None = None) -> None:
    """Operations that were done some time ago. Odd results are in blobs."""
    with database.write() as session:
        for seq_id in seq_ids:
            add_operation(session, run.id, seq_id)
            result = Payload(None, f"results/{seq_id}", 3) if seq_id % 2 else Payload(b"yes", None, 3)
            kind = None if failure else "proto"
            log.finish(session, [Finished(run.id, seq_id, None if failure else result, kind, failure)])
        done = update(Operation).where(Operation.model_id == run.id, Operation.seq_id.in_(seq_ids))
        session.execute(done.values(finished_at=utc_now() - ago))
        session.get_one(Run, run.id).applied_seq = max(seq_ids)


def prune(database: Database, limit: int = 99) -> tuple[int, list[str]]:
    with database.write() as session:
        return prune_results(session, quiet_since=utc_now() - DAY, limit=limit)


def kept(database: Database, run: Run) -> list[int]:
    query = select(Operation.seq_id).where(Operation.model_id == run.id, Operation.result_kind.is_not(None))
    with database.read() as session:
        return sorted(session.scalars(query))


def test_results_of_a_quiet_run_are_forgotten_and_their_rows_are_not(database: Database, run: Run) -> None:
    finish(database, run, 1, 2, ago=LONG_AGO)
    assert prune(database) == (2, ["results/1"])
    with database.read() as session:
        found = session.scalars(select(Operation).where(Operation.seq_id > 0).order_by(Operation.seq_id)).all()
    assert [row.state for row in found] == [DONE, DONE]
    assert [(row.result, row.result_blob, row.result_kind) for row in found] == [(None, None, None)] * 2
    assert prune(database) == (0, [])


@pytest.mark.parametrize("what", ["a request", "an operation that waits", "a result", "a failure"])
def test_a_run_that_is_not_quiet_keeps_its_old_results(database: Database, run: Run, what: str) -> None:
    """Whoever was away for a day, and had sent enough for two, finds it all."""
    finish(database, run, 1, 2, ago=LONG_AGO)
    if what == "a request":
        with database.write() as session:
            session.get_one(Run, run.id).last_request_at = utc_now()
    elif what == "an operation that waits":
        with database.write() as session:
            add_operation(session, run.id, 3)
    else:
        failure = Failure("no", "user") if what == "a failure" else None
        finish(database, run, 3, ago=timedelta(hours=1), failure=failure)
        with database.read() as session:
            assert session.get_one(Operation, (run.id, 3)).state == (FAILED if failure else DONE)
    assert prune(database) == (0, [])
    assert kept(database, run)[:2] == [1, 2]


def test_a_run_that_is_never_quiet_forgets_what_is_old_and_far_behind(database: Database, run: Run) -> None:
    finish(database, run, 1, 2, 3, ago=LONG_AGO)
    finish(database, run, 4, ago=timedelta(hours=23))
    for applied_seq, left in ((KEPT_BEHIND, [1, 2, 3, 4]), (KEPT_BEHIND + 2, [3, 4]), (3 * KEPT_BEHIND, [4])):
        with database.write() as session:
            values = {"applied_seq": applied_seq, "last_request_at": utc_now()}
            session.execute(update(Run).where(Run.id == run.id).values(**values))
        prune(database)
        assert kept(database, run) == left


def test_other_runs_do_not_count(database: Database, run: Run) -> None:
    busy, young = new_run(database), new_run(database, last_request_at=utc_now() - LONG_AGO)
    for each in (run, busy):
        finish(database, each, 1, 2, ago=LONG_AGO)
    finish(database, young, 1, 2, ago=timedelta(hours=23))
    assert prune(database)[0] == 2
    assert [kept(database, each) for each in (run, busy, young)] == [[], [1, 2], [1, 2]]


def test_so_many_at_once_are_forgotten_the_oldest_first(database: Database, run: Run) -> None:
    other = new_run(database, last_request_at=utc_now() - LONG_AGO)
    for each in (run, other):
        finish(database, each, 1, 2, ago=LONG_AGO)
    counts = [prune(database, limit=3)[0] for _ in range(3)]
    assert counts == [3, 1, 0]


def test_looking_for_old_results_never_scans_the_log(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    statements: list[tuple[str, tuple[object, ...]]] = []

    @event.listens_for(database.engine, "before_cursor_execute")
    def _remember(connection, cursor, statement, parameters, context, many) -> None:  # type: ignore[no-untyped-def]
        statements.append((statement, parameters))

    prune(database)
    (query,) = [(text, values) for text, values in statements if "RECURSIVE" in text]
    with database.read() as session:
        steps = [row[3] for row in session.connection().exec_driver_sql("EXPLAIN QUERY PLAN " + query[0], query[1])]
    tables = [step for step in steps if "operations" in step or "runs" in step]
    assert tables and all(step.startswith("SEARCH") for step in tables), steps
    assert sum("ix_operations_kept" in step for step in tables) == 3, steps
    database.dispose()
