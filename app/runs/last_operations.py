"""What is asked of a run's log when its session has ended: what still waits in it, and what the last state is."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import func, literal_column, select, update
from sqlalchemy.orm import Session

from app.db import utc_now
from app.runs.log import ACCEPTED, DONE, FAILED, Failure
from app.runs.models import Operation

_IS_ACCEPTED = Operation.state == literal_column(f"'{ACCEPTED}'")
_CHANGING_KINDS = ("forward_backward", "optim_step", "load_weights")


def fail_accepted(session: Session, model_id: str, failure: Failure) -> int:
    """Fail every operation of a run that has no result; returns how many."""
    query = (
        update(Operation)
        .where(Operation.model_id == model_id, _IS_ACCEPTED)
        .values(state=FAILED, error=failure.message, error_category=failure.category, finished_at=utc_now())
    )
    return session.execute(query.execution_options(synchronize_session=False)).rowcount  # type: ignore[attr-defined, no-any-return]


def newest_accepted(session: Session, model_id: str) -> datetime | None:
    """When the newest operation of a run that has no result was accepted."""
    return session.scalar(select(func.max(Operation.created_at)).where(Operation.model_id == model_id, _IS_ACCEPTED))


def newest_finished(session: Session, model_id: str) -> datetime | None:
    """When the newest operation of a run that has a result was finished."""
    return session.scalar(select(func.max(Operation.finished_at)).where(Operation.model_id == model_id))


def last_change(session: Session, model_id: str) -> int | None:
    """The last operation behind the creation that has changed the run's state, if there is one."""
    query = select(func.max(Operation.seq_id)).where(
        Operation.model_id == model_id,
        Operation.seq_id > 0,
        Operation.state == DONE,
        Operation.kind.in_(_CHANGING_KINDS),
    )
    return session.scalar(query)


def free_seq(session: Session, model_id: str, after: int) -> int:
    """The first sequence id behind `after` that no operation has."""
    query = select(Operation.seq_id).where(Operation.model_id == model_id, Operation.seq_id > after)
    expected = after + 1
    for seq_id in session.scalars(query.order_by(Operation.seq_id)):
        if seq_id != expected:
            break
        expected += 1
    return expected
