"""Leases: which worker may apply a run's operations. Every query on `runs` that a worker makes.

A lease is taken with a new epoch, and every commit is fenced by it: a worker that was paused and overtaken updates no
row. Only the database's clock decides about expiry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from sqlalchemy import ColumnElement, Table, and_, bindparam, case, exists, or_, select, update
from sqlalchemy.orm import Session

from app.db import database_clock
from app.runs.log import UNLOADED_SEQ
from app.runs.models import Operation, Run
from app.sessions.models import ClientSession


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to apply a run's operations. `crashes`: workers that died at the operation that comes next."""

    run: Run
    epoch: int
    crashes: int


def take(session: Session, *, worker_id: str, lease_s: float, model_ids: Iterable[str]) -> list[Lease]:
    """Take the runs that nobody holds, or that this worker holds and has forgotten. A holder whose lease has run out
    counts as dead, and its death as a crash of each run that it held; of one at which a worker has died before, only if
    that run was on trial. Those are on trial now (`try_`).
    """
    taken = []
    for model_id in sorted(model_ids):
        query = (
            update(Run)
            .where(Run.id == model_id, _is_free(worker_id))
            .values(
                worker_id=worker_id,
                epoch=Run.epoch + 1,
                lease_expires_at=database_clock() + lease_s,
                crash_count=case(
                    (or_(Run.worker_id.is_(None), Run.worker_id == worker_id), Run.crash_count),
                    (and_(Run.crash_seq == Run.applied_seq, Run.tried_seq == Run.applied_seq), Run.crash_count + 1),
                    (Run.crash_seq == Run.applied_seq, Run.crash_count),
                    else_=1,
                ),
                tried_seq=Run.applied_seq,
                crash_seq=case(
                    (or_(Run.worker_id.is_(None), Run.worker_id == worker_id), Run.crash_seq), else_=Run.applied_seq
                ),
            )
        )
        if _changed(session, query):
            run = session.get_one(Run, model_id, populate_existing=True)
            crashes = run.crash_count if run.crash_seq == run.applied_seq else 0
            taken.append(Lease(run, run.epoch, crashes))
    return taken


def try_(session: Session, *, worker_id: str, model_id: str, epoch: int, begins: bool) -> None:
    """Note that the trial of a run at which workers have died begins, or is over: its state is rebuilt, or its next
    operation computed, and if this worker dies of it, that counts. Nothing changes if the lease is lost."""
    _changed(session, _fenced(worker_id, model_id, epoch).values(tried_seq=Run.applied_seq if begins else None))


def renew(session: Session, *, worker_id: str, lease_s: float) -> int:
    """Renew every lease of a worker; returns how many it holds. One that ran out and was not taken is renewed too."""
    mine = _lock_all(session, worker_id)
    query = update(Run).where(mine).values(lease_expires_at=database_clock() + lease_s)
    return session.execute(query).rowcount  # type: ignore[attr-defined, no-any-return]


def release(session: Session, *, worker_id: str, model_id: str, epoch: int) -> bool:
    """Give a run back, so that any worker may take it at once. False if it was lost already."""
    return _changed(session, _fenced(worker_id, model_id, epoch).values(worker_id=None, lease_expires_at=None))


def release_all(session: Session, *, worker_id: str) -> int:
    """Give all runs of a worker back that ends while it still computes: what it has not committed by then it never
    will. Returns how many there were."""
    mine = _lock_all(session, worker_id)
    query = update(Run).where(mine).values(worker_id=None, lease_expires_at=None)
    return session.execute(query).rowcount  # type: ignore[attr-defined, no-any-return]


def _lock_all(session: Session, worker_id: str) -> ColumnElement[bool]:
    """Lock a worker's runs in the order of their ids, as commits do: else each could wait for what the other has."""
    mine = Run.worker_id == worker_id
    session.execute(select(Run.id).where(mine).order_by(Run.id).with_for_update(key_share=True)).all()
    return mine


_runs = cast(Table, Run.__table__)
_ADVANCE = (
    update(_runs)
    .where(_runs.c.id == bindparam("its_id"), _runs.c.worker_id == bindparam("its_worker"))
    .where(_runs.c.epoch == bindparam("its_epoch"))
    .values(applied_seq=bindparam("applied_seq"))
)
"""What nearly every commit needs, built once."""


def crash(session: Session, *, worker_id: str, model_id: str, epoch: int) -> bool:
    """Give a run back after its operations brought the cycle down: it counts like the death of a worker."""
    return _changed(
        session,
        _fenced(worker_id, model_id, epoch).values(
            worker_id=None,
            lease_expires_at=None,
            crash_count=case((Run.crash_seq == Run.applied_seq, Run.crash_count + 1), else_=1),
            crash_seq=Run.applied_seq,
        ),
    )


def advance(session: Session, *, worker_id: str, model_id: str, epoch: int, applied_seq: int, **values: Any) -> bool:
    """Move a run's position, fenced by the epoch. False if the lease is lost; then nothing of it may be committed."""
    if values:
        return _changed(session, _fenced(worker_id, model_id, epoch).values(applied_seq=applied_seq, **values))
    mine = {"its_id": model_id, "its_worker": worker_id, "its_epoch": epoch, "applied_seq": applied_seq}
    return session.connection().execute(_ADVANCE, mine).rowcount == 1


def set_recovery_snapshot(session: Session, *, worker_id: str, model_id: str, epoch: int, snapshot_id: str) -> bool:
    """Name the snapshot that a restore begins with, fenced by the epoch."""
    return _changed(session, _fenced(worker_id, model_id, epoch).values(recovery_snapshot_id=snapshot_id))


def free_runs(session: Session, model_ids: Iterable[str], *, worker_id: str) -> set[str]:
    """Those of the runs that `take` would give this worker now."""
    return set(session.scalars(select(Run.id).where(Run.id.in_(list(model_ids)), _is_free(worker_id))))


def runs_with_a_holder(session: Session, model_ids: Iterable[str]) -> set[str]:
    """Those of the runs that are a worker's, even if its lease has run out."""
    return set(session.scalars(select(Run.id).where(Run.id.in_(list(model_ids)), Run.worker_id.is_not(None))))


def forgotten_runs(session: Session, kept: Iterable[str], *, worker_id: str) -> dict[str, int]:
    """This worker's runs that are not among those which it keeps in slots, with their epochs."""
    query = select(Run.id, Run.epoch).where(Run.worker_id == worker_id, Run.id.not_in(list(kept)))
    return dict(session.execute(query).tuples().all())


def owners_of(session: Session, model_ids: Iterable[str]) -> dict[str, str]:
    """The owner of each run."""
    query = select(Run.id, Run.owner_id).where(Run.id.in_(list(model_ids)))
    return dict(session.execute(query).tuples().all())


def lost_runs(session: Session, epochs: Mapping[str, int], *, worker_id: str) -> set[str]:
    """Those of the runs (id → epoch) that this worker does not hold under that epoch any more."""
    query = select(Run.id, Run.epoch).where(Run.id.in_(list(epochs)), Run.worker_id == worker_id)
    return epochs.keys() - {row.id for row in session.execute(query) if epochs[row.id] == row.epoch}


def _is_free(worker_id: str) -> ColumnElement[bool]:
    return or_(Run.worker_id.is_(None), Run.worker_id == worker_id, Run.lease_expires_at < database_clock())


def abandoned_runs(session: Session, *, worker_id: str) -> set[str]:
    """Runs of this worker that were unloaded, or whose client has finished or was found to be silent."""
    query = (
        select(Run.id)
        .join(ClientSession, ClientSession.id == Run.session_id)
        .where(Run.worker_id == worker_id)
        .where(
            or_(
                exists().where(Operation.model_id == Run.id, Operation.seq_id == UNLOADED_SEQ),
                ClientSession.finished_at.is_not(None),
                ClientSession.silent_since.is_not(None),
            )
        )
    )
    return set(session.scalars(query))


def _fenced(worker_id: str, model_id: str, epoch: int) -> Any:
    return update(Run).where(Run.id == model_id, Run.worker_id == worker_id, Run.epoch == epoch)


def _changed(session: Session, query: Any) -> bool:
    result: Any = session.execute(query.execution_options(synchronize_session=False))
    return bool(result.rowcount == 1)
