"""Runs whose state cannot be rebuilt: what became of them, told to their clients.

What may pass by itself, a store that is away, is tried again for as long as it takes. Anything else counts like a
death at the run's next operation, and the third time its client is told: with a snapshot or a body that is damaged or
gone, all operations that wait fail, else the next one does. The log and the snapshot stay as they are, so a run goes on
once its files are what they were (from a backup, say); until then each further operation meets the same end.

A restore may also take its worker with it. An operation at which workers died is given up after the third death, before
anything of it is computed; so a fourth one there is the restore's, and all that waits fails without another. What comes
later is tried twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import structlog
from sqlalchemy.exc import DBAPIError, NoResultFound
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from app.db import Database
from app.errors import StorageUnavailable
from app.runs import log
from app.runs.log import FAILED, Failure, Finished, Ready
from app.storage.blobs import BlobMissing
from workers.metrics import FAILED_RECOVERIES
from workers.model.memory import is_out_of_memory
from workers.snapshot_files import BadSnapshot
from workers.train import lease, lease_events
from workers.train.lease import Lease
from workers.train.planner import MAX_CRASHES
from workers.train.shared import NotStoredYet

logger = structlog.get_logger(__name__)

_GONE = (BadSnapshot, BlobMissing, NoResultFound)
"""What a snapshot, its row or a body that is not what it was is told by."""


def lacks_memory(error: BaseException) -> bool:
    """Whether there was not enough memory for a restore."""
    return is_out_of_memory(error.__cause__ or error)


def give_back(database: Database, granted: Lease, error: Exception, *, worker_id: str, passing: bool = False) -> None:
    """Give a run back that could not be restored because of `error`; at the third time, fail what waits for it.
    `passing`: whether that may be over soon, where the error does not say."""
    run = granted.run
    fence: dict[str, Any] = {"worker_id": worker_id, "model_id": run.id, "epoch": granted.epoch}
    passing = passing or isinstance(error, StorageUnavailable | NotStoredYet | DBAPIError | PoolTimeout)
    FAILED_RECOVERIES.labels("passing" if passing else "lasting").inc()
    if passing:
        with database.write() as session:
            lease.release(session, **fence)
        lease_events.note("released", **fence)
        return
    with database.write() as session:
        if granted.crashes + 1 < MAX_CRASHES:
            lease.crash(session, **fence)
        else:
            waiting = log.ready_operations(session, {run.id: run.applied_seq}).get(run.id, [])
            doomed = waiting if isinstance(error, _GONE) else waiting[:1]
            _fail(session, doomed, _reason(error), fence)
            lease.release(session, **fence)
    lease_events.note("crashed", **fence, crashes=granted.crashes + 1)


def kills(granted: Lease) -> bool:
    """Whether workers have died of restoring the run."""
    return granted.crashes > MAX_CRASHES


def give_up(database: Database, granted: Lease, *, worker_id: str) -> None:
    """Give a run back whose restore has killed its workers, and fail what waits for it."""
    run = granted.run
    fence: dict[str, Any] = {"worker_id": worker_id, "model_id": run.id, "epoch": granted.epoch}
    FAILED_RECOVERIES.labels("lasting").inc()
    with database.write() as session:
        doomed = log.ready_operations(session, {run.id: run.applied_seq}).get(run.id, [])
        left = {"crash_seq": doomed[-1].seq_id, "crash_count": MAX_CRASHES - 1} if doomed else {}
        _fail(session, doomed, _unrebuilt("each worker that tried has ended with it"), fence, **left)
        lease.release(session, **fence)
    lease_events.note("released", **fence)


def _fail(session: Session, doomed: Sequence[Ready], reason: str, fence: dict[str, Any], **values: Any) -> None:
    if doomed and doomed[0].seq_id == 0:
        values["failed"] = True
    if not doomed or not lease.advance(session, **fence, applied_seq=doomed[-1].seq_id, **values):
        return
    log.finish(
        session,
        [
            Finished(one.model_id, one.seq_id, failure=Failure(f"{one.kind}: {reason}", "server"))
            for one in doomed
            if one.state != FAILED
        ],
    )
    logger.error("operations_given_up", model_id=fence["model_id"], count=len(doomed), reason=reason)


def _reason(error: Exception) -> str:
    if isinstance(error, BadSnapshot):
        why = f"its recovery snapshot cannot be used ({error})"
    elif isinstance(error, NoResultFound):
        why = "its recovery snapshot is not there any more"
    elif isinstance(error, BlobMissing):
        why = "a request that it depends on is lost"
    else:
        why = f"an earlier operation cannot be repeated ({type(error).__name__}; the server's log has the details)"
    return _unrebuilt(why)


def _unrebuilt(why: str) -> str:
    return f"the run's state cannot be rebuilt: {why}; go on from a saved checkpoint in a new run"
