"""How many runs of one tenant may be in slots at a time: `TINWORKS_RUNS_PER_TENANT`, of one base model.

Nothing is refused for it, least of all the creation of a run: one too many waits until another of its tenant has no
work or ends, and its polls say so (WIRE §3: `paused_capacity`).
"""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from app.db import database_clock
from app.runs.models import Run


def held_by_owner(
    session: Session, pool: str, owner_ids: Collection[str], *, besides: Collection[str] = ()
) -> dict[str, int]:
    """Runs of these owners, `besides` some, that live workers of the pool hold; owners without any are left out. What a
    dead worker held takes no place: else its runs would keep each other out."""
    query = (
        select(Run.owner_id, func.count())
        .where(Run.pool == pool, Run.worker_id.is_not(None), Run.lease_expires_at > database_clock())
        .where(Run.owner_id.in_(list(owner_ids)), Run.id.not_in(list(besides)))
        .group_by(Run.owner_id)
    )
    return dict(session.execute(query).tuples().all())


def why_it_waits(session: Session, model_id: str, most: int) -> str | None:
    """The reason, if a run that no worker holds waits because its tenant has `most` runs (0: any number) in slots."""
    run = session.get(Run, model_id)
    if not most or run is None or run.worker_id is not None or run.pool is None:
        return None
    if held_by_owner(session, run.pool, [run.owner_id]).get(run.owner_id, 0) < most:
        return None
    return (
        f"{most} runs of yours are in training in pool {run.pool}, the most at a time; this one waits for one of them"
    )
