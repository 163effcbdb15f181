"""Runs whose state cannot be rebuilt: what became of them, told to their clients.

What may pass by itself, a store that is away, is tried again for as long as it takes. Anything else counts like a
death at the run's next operation, and the third time its client is told: with a snapshot or a body that is damaged or
gone, all operations that wait fail, else the next one does. The log and the snapshot stay as they are, so a run goes on
once its files are what they were (from a backup, say); until then each further operation meets the same end.
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
from workers.snapshot_files import BadSnapshot
from workers.train import lease, lease_events
from workers.train.lease import Lease
from workers.train.planner import MAX_CRASHES
from workers.train.shared import NotStoredYet

logger = structlog.get_logger(__name__)

_GONE = (BadSnapshot, BlobMissing, NoResultFound)
"""What a snapshot, its row or a body that is not what it was is told by."""


def give_back(database: Database, granted: Lease, error: Exception, *, worker_id: str) -> None:
    """Give a run back that could not be restored because of `error`; at the third time, fail what waits for it."""
    run = granted.run
    fence: dict[str, Any] = {"worker_id": worker_id, "model_id": run.id, "epoch": granted.epoch}
    passing = isinstance(error, StorageUnavailable | NotStoredYet | DBAPIError | PoolTimeout)
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


def _fail(session: Session, doomed: Sequence[Ready], reason: str, fence: dict[str, Any]) -> None:
    values: dict[str, Any] = {"failed": True} if doomed and doomed[0].seq_id == 0 else {}
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
    return f"the run's state cannot be rebuilt: {why}; go on from a saved checkpoint in a new run"
