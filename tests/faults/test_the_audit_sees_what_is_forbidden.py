"""The audit that chaos and faults rely on: changes made by hand are reported, on each database, and lawful ones not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import delete, update
from sqlalchemy.orm import Session

from app.db import Database
from app.runs import log
from app.runs.log import ACCEPTED, DONE, Failure, Finished, Payload
from app.runs.models import Operation, Run
from tests import factories
from tests.faults import audit
from workers.train import lease

LAST = 4
REFUSED = 2
WORKER = "worker"


@pytest.fixture
def model_id(database: Database) -> str:
    """A run that a worker has brought to operation 4, as workers do, in two commits; operation 2 failed on arrival."""
    audit.begin(database)
    model_id = factories.new_run(database, applied_seq=-1).id
    with database.write() as session:
        for seq_id in range(LAST + 1):
            failure = Failure("data: none", "user") if seq_id == REFUSED else None
            factories.add_operation(session, model_id, seq_id, failure=failure)
        (held,) = lease.take(session, worker_id=WORKER, lease_s=60.0, model_ids=[model_id])
    for first, last in ((0, 1), (2, LAST)):
        with database.write() as session:
            commit(session, model_id, held.epoch, range(first, last + 1))
    return model_id


def commit(session: Session, model_id: str, epoch: int, seq_ids: range) -> None:
    """What a train worker commits of a cycle."""
    assert lease.advance(session, worker_id=WORKER, model_id=model_id, epoch=epoch, applied_seq=seq_ids[-1])
    result = Payload(b"{}", None, 2)
    log.finish(session, [Finished(model_id, seq_id, result, "json") for seq_id in seq_ids if seq_id != REFUSED])


def change_run(session: Session, model_id: str, **values: object) -> None:
    session.execute(update(Run).where(Run.id == model_id).values(values))


def change_operation(session: Session, model_id: str, seq_id: int, **values: object) -> None:
    session.execute(update(Operation).where(Operation.model_id == model_id, Operation.seq_id == seq_id).values(values))


def move_back_and_forth(session: Session, model_id: str) -> None:
    change_run(session, model_id, applied_seq=1)
    change_run(session, model_id, applied_seq=LAST)


def finish_again(session: Session, model_id: str) -> None:
    change_operation(session, model_id, 3, state=ACCEPTED)
    change_operation(session, model_id, 3, state=DONE)


def finish_too_early(session: Session, model_id: str) -> None:
    factories.add_operation(session, model_id, LAST + 1)
    change_operation(session, model_id, LAST + 1, state=DONE)
    change_run(session, model_id, applied_seq=LAST + 1)


def leave_one_out(session: Session, model_id: str) -> None:
    factories.add_operation(session, model_id, LAST + 1)
    change_run(session, model_id, applied_seq=LAST + 1)


def come_back(session: Session, model_id: str) -> None:
    session.execute(delete(Operation).where(Operation.model_id == model_id, Operation.seq_id == LAST))
    factories.add_operation(session, model_id, LAST)
    change_operation(session, model_id, LAST, state=DONE, result=b"{}")


FORBIDDEN: dict[str, tuple[Callable[[Session, str], None], int, str]] = {
    "a position moved back and forth": (move_back_and_forth, LAST, "the position went from 4 to 1"),
    "a position written again": (
        lambda session, model_id: change_run(session, model_id, applied_seq=LAST),
        LAST,
        "the position went from 4 to 4",
    ),
    "a position in the middle of nowhere": (
        lambda session, model_id: change_run(session, model_id, applied_seq=LAST + 3),
        LAST,
        "the position came to 7, not to 4",
    ),
    "a state changed twice": (
        finish_again,
        LAST,
        "operation 3 was not finished exactly once: accepted → done → accepted → done",
    ),
    "an operation that came twice": (
        come_back,
        LAST,
        "operation 4 was not finished exactly once: accepted → done → accepted → done",
    ),
    "an operation finished before the position": (
        finish_too_early,
        LAST + 1,
        "operation 5 was finished when the position went from 1 to 4",
    ),
    "an operation left out": (leave_one_out, LAST + 1, "operation 5 was not finished exactly once: accepted"),
    "an operation that did not wait": (finish_too_early, LAST, "operation 5 comes after the last one, 4, and did not"),
    "an operation that never came": (
        lambda session, model_id: change_run(session, model_id, applied_seq=LAST + 1),
        LAST + 1,
        "operation 5 was not finished exactly once: it never came",
    ),
    "another result": (
        lambda session, model_id: change_operation(session, model_id, 1, result=b'{"a": 1}'),
        LAST,
        "the result of operation 1 was written again after it was finished",
    ),
    "another error": (
        lambda session, model_id: change_operation(session, model_id, REFUSED, error="other"),
        LAST,
        "the result of operation 2 was written again after it was finished",
    ),
    "an epoch that falls": (
        lambda session, model_id: change_run(session, model_id, epoch=0),
        LAST,
        "the epoch went from 1 to 0",
    ),
    "an epoch given twice": (
        lambda session, model_id: change_run(session, model_id, epoch=1),
        LAST,
        "the epoch went from 1 to 1",
    ),
}


def test_what_workers_do_is_lawful(database: Database, model_id: str) -> None:
    with database.write() as session:
        lease.release(session, worker_id=WORKER, model_id=model_id, epoch=1)
        lease.take(session, worker_id="other", lease_s=60.0, model_ids=[model_id])
        factories.add_operation(session, model_id, LAST + 2)
        log.prune_bodies(session, model_id, after=-1, upto=LAST)
        log.finish(session, [Finished(model_id, 1, Payload(b"again", None, 5), "json")])
    assert audit.violations(database, model_id, LAST) == []


@pytest.mark.parametrize("name", FORBIDDEN)
def test_a_forbidden_change_is_reported(database: Database, model_id: str, name: str) -> None:
    change, last, words = FORBIDDEN[name]
    with database.write() as session:
        change(session, model_id)
    reported = audit.violations(database, model_id, last)
    assert any(words in one for one in reported), reported
    with pytest.raises(AssertionError):
        audit.assert_exactly_once(database, model_id, last)


def test_a_result_may_be_forgotten_where_that_is_allowed(database: Database, model_id: str) -> None:
    with database.write() as session:
        change_operation(session, model_id, 1, result=None, result_blob=None, result_kind=None)
    assert audit.violations(database, model_id, LAST, may_forget=True) == []
    assert audit.violations(database, model_id, LAST) == ["the result of operation 1 was forgotten"]


def test_what_was_rolled_back_has_not_happened(database: Database, model_id: str) -> None:
    with pytest.raises(ZeroDivisionError), database.write() as session:
        move_back_and_forth(session, model_id)
        raise ZeroDivisionError
    assert audit.violations(database, model_id, LAST) == []
