"""The end of sessions, and what it leaves of their runs: their checkpoints.

A session ends when its client says so, or after long silence. Then each of its runs is closed, in steps of which each
leaves the log whole and may be the last one, by any number of janitors at once:

1. What was accepted still finishes. What nobody has done a while after the end, or after the one before it (nobody
   serves the model, or a sequence id never came), fails.
2. The worker that holds the run gives it back.
3. The last state becomes a checkpoint, `weights/auto-last`, for a time: a snapshot that has it gets the name. If there
   is none, because the worker died, a save is put into the log, and whoever serves the model does it.
4. Nothing refers to the snapshot for recovery any more, and the bodies of the log go.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import orjson
import structlog
from sqlalchemy import ColumnElement, exists, or_, select, update
from sqlalchemy.orm import Session

from app.audit import service as audit
from app.checkpoints import service as checkpoints
from app.checkpoints.models import Checkpoint, Snapshot
from app.checkpoints.quota import NewName, check_quota
from app.db import database_clock, utc_now
from app.errors import InvalidRequest
from app.runs import last_operations, log
from app.runs.log import Failure, Payload
from app.runs.models import Operation, Run
from app.sessions.models import ClientSession

logger = structlog.get_logger(__name__)

AUTO_LAST = "auto-last"
"""Name of the checkpoint, and fingerprint of the operation that saves it."""
_EVERYTHING = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Closing:
    """How runs are closed. `patience`: how long after the end, and after they were accepted, operations may take.
    `ttl_s`: how long the last state is kept; 0: not at all. `quota_bytes`: of one tenant; 0: any number."""

    patience: timedelta
    ttl_s: int
    quota_bytes: int = 0


def end_silent(session: Session, *, silent_before: datetime) -> int:
    """End the sessions that have been known to be silent since before a time; returns how many."""
    query = (
        update(ClientSession)
        .where(ClientSession.finished_at.is_(None), ClientSession.silent_since < silent_before)
        .values(finished_at=utc_now(), finish_reason="interrupted", finish_detail="the client was silent for too long")
    )
    return session.execute(query).rowcount  # type: ignore[attr-defined, no-any-return]


def runs_to_close(session: Session, *, limit: int = 200) -> list[str]:
    """Runs of sessions that have ended which are not closed, longest ended first."""
    query = (
        select(Run.id)
        .join(ClientSession, ClientSession.id == Run.session_id)
        .where(Run.closed_at.is_(None), ClientSession.finished_at.is_not(None))
        .order_by(ClientSession.finished_at)
        .limit(limit)
    )
    return list(session.scalars(query))


def close_run(session: Session, model_id: str, how: Closing) -> list[str] | None:
    """Bring a run of an ended session nearer to its end. Returns the blobs to delete once this is committed, if it is
    closed now; None if somebody has to do something first."""
    query = select(Run).where(Run.id == model_id, Run.closed_at.is_(None)).with_for_update(skip_locked=True)
    run = session.scalar(query)
    if run is None or not _is_at_rest(session, run, how) or not _is_kept(session, run, how):
        return None
    run.closed_at, run.recovery_snapshot_id = utc_now(), None
    _take_back(run)
    logger.info("run_closed", model_id=run.id, applied_seq=run.applied_seq)
    return log.prune_bodies(session, run.id, after=log.UNLOADED_SEQ, upto=_EVERYTHING)


def _take_back(run: Run) -> None:
    """No worker may commit anything of the run any more."""
    run.worker_id, run.lease_expires_at, run.epoch = None, None, run.epoch + 1


def _is_at_rest(session: Session, run: Run, how: Closing) -> bool:
    """Whether no operation waits, after those that have waited too long have failed, and no worker holds the run."""
    newest = last_operations.newest_accepted(session, run.id)
    if newest is None:
        return session.scalar(select(Run.id).where(Run.id == run.id, _is_held())) is None
    ended = session.get_one(ClientSession, run.session_id).finished_at or utc_now()
    advanced = last_operations.newest_finished(session, run.id) or ended
    if utc_now() < max(newest, ended, advanced) + how.patience:
        return False
    _take_back(run)
    failed = last_operations.fail_accepted(
        session, run.id, Failure("session_id: the session ended before this was done", "user")
    )
    logger.warning("operations_of_ended_session_failed", model_id=run.id, count=failed)
    return True


def _is_held() -> ColumnElement[bool]:
    return Run.lease_expires_at > database_clock()


def _is_kept(session: Session, run: Run, how: Closing) -> bool:
    """Whether the last state has its name, or needs none; if not, it is asked for."""
    changed = last_operations.last_change(session, run.id)
    if changed is None or run.failed or run.copied_from is not None or not how.ttl_s:
        return True
    if checkpoints.exists(session, run.id, checkpoints.TRAINING, AUTO_LAST):
        return True
    snapshot = _newest_snapshot(session, run)
    has_last_state = snapshot is not None and snapshot.seq_id >= changed
    if not has_last_state and not _was_asked_for(session, run):
        _ask_for(session, run, how)
        return False
    if snapshot is not None:
        _name(session, run, snapshot, how)
    return True


def _newest_snapshot(session: Session, run: Run) -> Snapshot | None:
    """Of those of its own whose files are there for sure."""
    named = exists().where(Checkpoint.snapshot_id == Snapshot.id, checkpoints.is_live())
    query = (
        select(Snapshot)
        .where(Snapshot.model_id == run.id, Snapshot.kind == "state")
        .where(or_(Snapshot.id == run.recovery_snapshot_id, named))
        .order_by(Snapshot.seq_id.desc())
        .limit(1)
    )
    return session.scalar(query)


def _was_asked_for(session: Session, run: Run) -> bool:
    query = select(Operation.seq_id).where(Operation.model_id == run.id, Operation.fingerprint == AUTO_LAST)
    return session.scalar(query) is not None


def _ask_for(session: Session, run: Run, how: Closing) -> None:
    body = orjson.dumps({"path": AUTO_LAST, "ttl_seconds": how.ttl_s, "overwrite": False, "user_metadata": None})
    log.append(
        session,
        model_id=run.id,
        seq_id=last_operations.free_seq(session, run.id, run.applied_seq),
        kind="save_weights",
        fingerprint=AUTO_LAST,
        body=Payload(body, None, len(body)),
    )


def _name(session: Session, run: Run, snapshot: Snapshot, how: Closing) -> None:
    new = NewName(run.owner_id, run.id, checkpoints.TRAINING, AUTO_LAST)
    try:
        check_quota(session, new, snapshot_id=snapshot.id, size_bytes=snapshot.size_bytes, limit=how.quota_bytes)
    except InvalidRequest as error:
        logger.warning("last_state_not_kept", model_id=run.id, reason=error.detail)
        return
    path = checkpoints.name_snapshot(
        session,
        owner_id=run.owner_id,
        model_id=run.id,
        kind=checkpoints.TRAINING,
        name=AUTO_LAST,
        snapshot_id=snapshot.id,
        ttl_seconds=how.ttl_s,
        user_metadata=None,
    )
    details = {"model_id": run.id, "tinker_path": path, "seq_id": snapshot.seq_id, "ttl_seconds": how.ttl_s}
    audit.record(session, run.owner_id, "checkpoints", "checkpoint_save", **details)
