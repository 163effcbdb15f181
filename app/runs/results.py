"""How long the results of operations are kept: until their run has been quiet for long.

Whoever polls late finds what he has not got yet, however long that took. A run that is never quiet keeps of the results
that are as old only those of its last `KEPT_BEHIND` operations: no client leaves so many unasked and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from sqlalchemy import CTE, and_, exists, func, literal_column, select, update
from sqlalchemy.orm import Session, aliased

from app.runs.models import Operation, Run

KEPT_BEHIND = 2000
"""Operations behind the last one that was applied."""
_LAST = 100
"""Operations of a run among which the one is that finished last: only what failed on arrival comes before its turn."""
_EVER = 2**31 - 1
_IS_KEPT = Operation.result_kind.is_not(None)


def prune_results(session: Session, *, quiet_since: datetime, limit: int) -> tuple[int, list[str]]:
    """Forget results that were made before `quiet_since`, so many at most: of runs that were quiet since then all, of
    others those that are far behind. Returns how many, and the blobs to delete once this is committed."""
    count, blobs = 0, list[str]()
    for model_id, upto in _runs_to_prune(session, quiet_since):
        query = (
            select(Operation.seq_id, Operation.finished_at, Operation.result_blob)
            .where(Operation.model_id == model_id, Operation.seq_id <= upto, _IS_KEPT)
            .order_by(Operation.seq_id)
            .limit(limit - count)
            .with_for_update(skip_locked=True)
        )
        rows = [row for row in session.execute(query) if row.finished_at < quiet_since]
        session.execute(
            update(Operation)
            .where(Operation.model_id == model_id, Operation.seq_id.in_([row.seq_id for row in rows]))
            .values(result=None, result_blob=None, result_kind=None)
            .execution_options(synchronize_session=False)
        )
        count += len(rows)
        blobs += [row.result_blob for row in rows if row.result_blob]
        if count == limit:
            break
    return count, blobs


def _runs_to_prune(session: Session, quiet_since: datetime) -> Iterator[tuple[str, int]]:
    """The runs that have something to forget, and up to which sequence id. Operations are finished in their order, so
    a run's first result is its oldest."""
    first, kept = aliased(Operation), _runs_with_results()
    first_seq = (
        select(Operation.seq_id)
        .where(Operation.model_id == Run.id, _IS_KEPT)
        .order_by(Operation.seq_id)
        .limit(1)
        .scalar_subquery()
    )
    is_quiet = and_(
        Run.last_request_at < quiet_since,
        ~exists().where(Operation.model_id == Run.id, Operation.state == literal_column("'accepted'")),
        ~exists().where(
            Operation.model_id == Run.id,
            Operation.seq_id > Run.applied_seq - _LAST,
            Operation.finished_at >= quiet_since,
        ),
    )
    query = (
        select(Run.id, Run.applied_seq, first.seq_id, is_quiet)
        .join(kept, kept.c.model_id == Run.id)
        .join(first, and_(first.model_id == Run.id, first.seq_id == first_seq))
        .where(first.finished_at < quiet_since)
    )
    for model_id, applied_seq, seq_id, quiet in session.execute(query).all():
        upto = _EVER if quiet else applied_seq - KEPT_BEHIND
        if seq_id <= upto:
            yield model_id, upto


def _runs_with_results() -> CTE:
    """From one run to the next by an index, over whatever each has: what is forgotten is not passed over."""
    runs = select(func.min(Operation.model_id).label("model_id")).where(_IS_KEPT).cte("kept", recursive=True)
    following = select(func.min(Operation.model_id)).where(_IS_KEPT, Operation.model_id > runs.c.model_id)
    return runs.union_all(select(following.scalar_subquery()).where(runs.c.model_id.is_not(None)))
