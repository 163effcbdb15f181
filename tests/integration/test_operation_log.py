"""The operation log on both databases: one row per request, order without gaps, and what is forgotten when."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import func, select, text, update
from sqlalchemy.exc import IntegrityError

from app.db import Database, utc_now
from app.errors import ConflictingReplay
from app.runs import log
from app.runs.log import ACCEPTED, DONE, FAILED, Failure, Finished, Payload, Ready
from app.runs.models import LOG_FORMAT, Operation, Run
from tests.factories import POOL, add_operation, new_run


@pytest.fixture
def run(database: Database) -> Run:
    return new_run(database)


def append(database: Database, run: Run, *seq_ids: int, **values: object) -> None:
    for seq_id in seq_ids:
        with database.write() as session:
            add_operation(session, run.id, seq_id, **values)  # type: ignore[arg-type]


def ready(database: Database, run: Run, *, after: int = 0, limit: int = 256) -> list[int]:
    with database.read() as session:
        found = log.ready_operations(session, {run.id: after}, limit=limit)
    return [operation.seq_id for operation in found.get(run.id, [])]


def rows(database: Database, run: Run) -> dict[int, Operation]:
    with database.read() as session:
        query = select(Operation).where(Operation.model_id == run.id).order_by(Operation.seq_id)
        return {row.seq_id: row for row in session.scalars(query)}


# -- append


def test_a_repeated_request_adds_nothing(database: Database, run: Run) -> None:
    with database.write() as session:
        assert add_operation(session, run.id, 1, body=b"first")
    with database.write() as session:
        assert not add_operation(session, run.id, 1, body=b"second")
    assert [row.body for row in rows(database, run).values()] == [b"first"]


def test_a_repeat_is_known_after_its_result(database: Database, run: Run) -> None:
    append(database, run, 1)
    with database.write() as session:
        log.finish(session, [Finished(run.id, 1, Payload(b"{}", None, 2), "json")])
        assert not add_operation(session, run.id, 1)
    assert rows(database, run)[1].state == DONE


def test_another_request_with_the_same_number_is_refused(database: Database, run: Run) -> None:
    append(database, run, 1)
    with pytest.raises(ConflictingReplay, match=r"seq_id: 1 of .* forward_backward"), database.write() as session:
        add_operation(session, run.id, 1, fingerprint="other")
    assert rows(database, run)[1].fingerprint == "f"


def test_a_number_of_one_run_is_free_in_another(database: Database, run: Run) -> None:
    append(database, run, 1)
    other = new_run(database)
    append(database, other, 1, fingerprint="other")
    assert ready(database, run) == ready(database, other) == [1]


def test_equal_requests_at_once_become_one_row(database: Database, run: Run) -> None:
    barrier = threading.Barrier(6)

    def add(_: int) -> bool:
        with database.read() as session:
            session.execute(text("SELECT 1"))  # every thread has its connection when the race begins
            barrier.wait()
        try:
            with database.write() as session:
                return add_operation(session, run.id, 1)
        except IntegrityError:  # what the caller answers by asking again
            with database.write() as session:
                return add_operation(session, run.id, 1)

    with ThreadPoolExecutor(6) as pool:
        added = list(pool.map(add, range(6)))
    assert added.count(True) == 1
    assert list(rows(database, run)) == [1]


def test_a_request_that_failed_on_arrival_takes_its_place(database: Database, run: Run) -> None:
    append(database, run, 1, failure=Failure("data[0]: wrong", "user"))
    row = rows(database, run)[1]
    assert (row.state, row.error, row.error_category) == (FAILED, "data[0]: wrong", "user")
    assert row.finished_at is not None
    assert ready(database, run) == [1]


# -- what is ready


def test_operations_are_ready_when_all_before_them_have_arrived(database: Database, run: Run) -> None:
    found = []
    for arriving in (2, 3, 1):
        append(database, run, arriving)
        found.append(ready(database, run))
    assert found == [[], [], [1, 2, 3]]


def test_a_gap_ends_what_is_ready(database: Database, run: Run) -> None:
    append(database, run, 1, 2, 4, 5)
    assert ready(database, run) == [1, 2]


def test_what_is_applied_is_not_ready_again(database: Database, run: Run) -> None:
    append(database, run, 1, 2, 3)
    assert ready(database, run, after=2) == [3]


def test_no_more_is_ready_than_asked_for(database: Database, run: Run) -> None:
    append(database, run, *range(1, 8))
    assert ready(database, run, limit=3) == [1, 2, 3]


def test_a_row_of_a_newer_release_is_left_to_it(database: Database, run: Run) -> None:
    append(database, run, 1, 2, 3)
    with database.write() as session:
        session.execute(update(Operation).where(Operation.seq_id == 2).values(format=LOG_FORMAT + 1))
    assert ready(database, run) == [1]


def test_an_operation_is_ready_with_what_the_planner_needs(database: Database, run: Run) -> None:
    append(database, run, 1, kind="optim_step", tokens=7, body=b"12345")
    with database.read() as session:
        found = log.ready_operations(session, {run.id: 0})
    assert found == {run.id: [Ready(run.id, 1, "optim_step", ACCEPTED, 7, 5)]}


def test_runs_with_accepted_operations_are_pending_in_their_pool(database: Database, run: Run) -> None:
    done, elsewhere = new_run(database), new_run(database, pool="other")
    append(database, run, 1)
    append(database, done, 1, failure=Failure("x", "user"))
    append(database, elsewhere, 1)
    with database.read() as session:
        assert log.pending_runs(session, POOL) == {run.id}


# -- finish


def test_a_finished_operation_keeps_what_it_had(database: Database, run: Run) -> None:
    append(database, run, 1)
    with database.write() as session:
        log.finish(session, [Finished(run.id, 1, Payload(b"one", None, 3), "proto")])
        log.finish(session, [Finished(run.id, 1, failure=Failure("late", "server"))])
    row = rows(database, run)[1]
    assert (row.state, row.result, row.result_kind, row.error) == (DONE, b"one", "proto", None)


def test_finished_futures_are_found_among_those_asked_for(database: Database, run: Run) -> None:
    append(database, run, 1, 2)
    append(database, run, 3, failure=Failure("x", "user"))
    with database.write() as session:
        log.finish(session, [Finished(run.id, 1, Payload(b"", None, 0), "json")])
    with database.read() as session:
        asked = [f"{run.id}:{n}" for n in (1, 2, 3, 4)]
        assert log.is_finished(session, asked) == {f"{run.id}:1", f"{run.id}:3"}


# -- gaps


def age(database: Database, run: Run, seq_id: int, by: timedelta) -> None:
    with database.write() as session:
        found = log.find(session, run.id, seq_id)
        assert found is not None
        found.created_at = utc_now() - by


def fill(database: Database) -> list[tuple[str, int]]:
    with database.write() as session:
        return log.fill_gaps(session, older_than=timedelta(minutes=20))


def test_numbers_that_never_came_become_failed_operations(database: Database, run: Run) -> None:
    append(database, run, 1, 4, 6)
    age(database, run, 4, timedelta(minutes=21))
    assert fill(database) == [(run.id, 2), (run.id, 3)]
    made = rows(database, run)[2]
    assert (made.state, made.kind, made.error_category) == (FAILED, "missing", "user")
    assert "2 never arrived" in str(made.error)
    assert ready(database, run) == [1, 2, 3, 4]


def test_a_gap_that_no_client_leaves_is_filled_bit_by_bit(database: Database, run: Run) -> None:
    append(database, run, 1, 2**31 - 1)
    age(database, run, 2**31 - 1, timedelta(minutes=21))
    assert fill(database) == [(run.id, seq_id) for seq_id in range(2, 1002)]
    assert fill(database)[:2] == [(run.id, 1002), (run.id, 1003)]


def test_a_gap_is_left_alone_while_nothing_has_waited_long(database: Database, run: Run) -> None:
    append(database, run, 2)
    age(database, run, 2, timedelta(minutes=19))
    assert fill(database) == []


def test_a_gap_is_filled_once(database: Database, run: Run) -> None:
    append(database, run, 2)
    age(database, run, 2, timedelta(minutes=21))
    assert fill(database) == [(run.id, 1)]
    assert fill(database) == []


def test_a_request_that_comes_after_its_gap_was_filled_finds_its_failure(database: Database, run: Run) -> None:
    append(database, run, 2)
    age(database, run, 2, timedelta(minutes=21))
    fill(database)
    with database.write() as session:
        assert not add_operation(session, run.id, 1)
    assert rows(database, run)[1].state == FAILED


def test_the_first_number_that_is_awaited_is_told(database: Database, run: Run) -> None:
    append(database, run, 1, 3, 5)
    with database.read() as session:
        assert [log.awaited_seq(session, run.id, seq_id) for seq_id in (1, 3, 5)] == [None, 2, 2]
        assert log.awaited_seq(session, "unknown", 1) is None


# -- forgetting


def test_bodies_that_a_snapshot_covers_are_forgotten(database: Database, run: Run) -> None:
    append(database, run, 1)
    append(database, run, 2, 3, body_blob="bodies/2")
    with database.write() as session:
        assert log.prune_bodies(session, run.id, after=-1, upto=2) == ["bodies/2"]
        assert log.prune_bodies(session, run.id, after=-1, upto=2) == []
    found = rows(database, run)
    assert [(row.body, row.body_blob) for row in found.values()] == [(None, None), (None, None), (None, "bodies/2")]
    assert found[2].body_bytes == 4


def test_a_repeat_of_a_forgotten_request_is_known(database: Database, run: Run) -> None:
    append(database, run, 1)
    with database.write() as session:
        log.prune_bodies(session, run.id, after=-1, upto=1)
        assert not add_operation(session, run.id, 1)


def test_a_run_that_is_deleted_takes_its_operations_with_it(database: Database, run: Run) -> None:
    append(database, run, 1, 2)
    with database.write() as session:
        session.delete(session.get_one(Run, run.id))
    with database.read() as session:
        assert session.scalar(select(func.count()).select_from(Operation)) == 0
