"""Recovery: a run's state rebuilt from its last snapshot and the log after it, and the snapshots that keep that short.

Loading, resuming, evicting, moving a run to another worker and recovering from a crash are all this one thing.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import select
from sqlalchemy.orm import Session
from structlog.contextvars import bound_contextvars

from app.checkpoints import service as checkpoints
from app.checkpoints.models import Checkpoint, Snapshot
from app.checkpoints.service import snapshot_folder
from app.db import Database
from app.runs import log
from app.runs.log import Ready
from app.storage.blobs import BlobStore
from workers.metrics import REPLAYED, REPLAYED_SECONDS, SNAPSHOT_SECONDS, SNAPSHOTS
from workers.model.base import BaseModel
from workers.model.engine import Engine
from workers.spool import Spool
from workers.train import lease, snapshots
from workers.train.bounds import Lag
from workers.train.execute import Executor
from workers.train.lease import Lease
from workers.train.replay import Replay
from workers.train.slots import Slot
from workers.train.snapshots import StateCopy

logger = structlog.get_logger(__name__)


def restore(
    granted: Sequence[Lease],
    executor: Executor,
    database: Database,
    blobs: BlobStore,
    base: BaseModel,
    *,
    begin_s: float = float("inf"),
) -> dict[str, Slot | Exception]:
    """The slots of runs as they stand at `applied_seq`, by their ids: their snapshots, then the logs after them. For
    one that cannot be restored, why. When reading snapshots has taken `begin_s` seconds, the rest is left out."""
    slots: dict[str, Slot] = {}
    logs: dict[str, Sequence[Ready]] = {}
    failed: dict[str, Exception] = {}
    end = time.monotonic() + begin_s
    for number, one in enumerate(granted):
        if number and time.monotonic() > end:
            break
        try:
            with bound_contextvars(model_id=one.run.id):
                slots[one.run.id], logs[one.run.id] = _begin(one, database, blobs, base)
        except Exception as error:
            failed[one.run.id] = error
    replay = Replay(slots, logs, executor, database, blobs)
    replay.run()
    for model_id in slots.keys() - replay.errors.keys():
        _restored(slots[model_id], logs[model_id], replay.seconds[model_id])
    return slots | failed | replay.errors


def _begin(granted: Lease, database: Database, blobs: BlobStore, base: BaseModel) -> tuple[Slot, Sequence[Ready]]:
    """A slot at the run's last snapshot, and what it has done since."""
    run = granted.run
    slot = Slot(run=run, epoch=granted.epoch, applied_seq=run.applied_seq, crashes=granted.crashes)
    slot.on_trial = granted.crashes > 0
    slot.recovery_snapshot_id = run.recovery_snapshot_id
    if run.recovery_snapshot_id is not None:
        with database.read() as session:
            slot.recovery_seq = session.get_one(Snapshot, run.recovery_snapshot_id).seq_id
        began = time.monotonic()
        slot.state = snapshots.read_state(blobs, run.recovery_snapshot_id, base, slot.optimizer_kind, optimizer=True)
        slot.read_s = time.monotonic() - began
    with database.read() as session:
        return slot, log.applied_operations(session, run.id, slot.recovery_seq, run.applied_seq)


def _restored(slot: Slot, operations: Sequence[Ready], seconds: float) -> None:
    REPLAYED.inc(len(operations))
    REPLAYED_SECONDS.inc(seconds)
    slot.since = time.monotonic()
    slot.lag = Lag(len(operations), sum(operation.body_bytes for operation in operations), seconds)
    if operations or slot.recovery_seq >= 0:
        facts = {"seq_id": slot.applied_seq, "replayed": len(operations), "replay_s": round(seconds, 3)}
        logger.info("run_restored", model_id=slot.run.id, epoch=slot.epoch, **facts)


_MOST_WAITING = 2
"""Copies of states that wait to be written, beside the one that is being written."""


@dataclass(slots=True, eq=False)
class _Job:
    slot: Slot
    copy: StateCopy
    seq_id: int
    written: threading.Event
    copy_s: float


class SnapshotWriter:
    """Writes recovery snapshots from a thread of its own; the train loop only pays for the copy to host memory."""

    def __init__(self, database: Database, blobs: BlobStore, engine: Engine, *, worker_id: str, spool: Spool) -> None:
        self._database = database
        self._blobs = blobs
        self._engine = engine
        self._worker_id = worker_id
        self._spool = spool
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)

    def start(self) -> None:
        """Start the writer's thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Write what waits, then stop."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    @property
    def is_busy(self) -> bool:
        """Whether copies wait already: more of them would only take memory."""
        return self._jobs.qsize() >= _MOST_WAITING

    def write_now(self, slot: Slot, timeout_s: float = 60.0) -> None:
        """Write the run's state, after all that was submitted before, and wait for it."""
        self.submit(slot).wait(timeout_s)

    def submit(self, slot: Slot) -> threading.Event:
        """Take a copy of the run's state now and write it soon. The event is set when that is over, well or not."""
        assert slot.state is not None
        began = time.monotonic()
        self._engine.collect_gradients([slot.state.adapter])
        copy = snapshots.copy_state(slot.state, self._engine.base, seq_id=slot.applied_seq)
        job = _Job(slot, copy, slot.applied_seq, threading.Event(), time.monotonic() - began)
        slot.snapshot_pending = True
        slot.unwritten, slot.lag = slot.to_repeat, Lag()
        self._jobs.put(job)
        return job.written

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            began = time.monotonic()
            try:
                with bound_contextvars(model_id=job.slot.run.id), SNAPSHOT_SECONDS.time():
                    self._write(job)
                SNAPSHOTS.labels("written").inc()
                job.slot.unwritten = Lag()
                job.slot.snapshot_cost_s = job.copy_s + time.monotonic() - began
            except Exception as error:  # the log still has everything; the next bound tries again
                SNAPSHOTS.labels("failed").inc()
                logger.error("snapshot_failed", model_id=job.slot.run.id, seq_id=job.seq_id, exc_info=error)
            finally:
                job.slot.snapshot_pending = False
                job.written.set()

    def _write(self, job: _Job) -> None:
        slot = job.slot
        with self._spool.folder() as folder:
            files = snapshots.state_files(job.copy, self._engine.base, folder=folder)
            size_bytes = files.size_bytes
            snapshots.write(self._blobs, files)
        previous = slot.recovery_snapshot_id
        with self._database.write() as session:
            checkpoints.add_snapshot(
                session,
                snapshot_id=files.id,
                owner_id=slot.run.owner_id,
                model_id=slot.run.id,
                seq_id=job.seq_id,
                kind="state",
                size_bytes=size_bytes,
            )
            kept = lease.set_recovery_snapshot(
                session, worker_id=self._worker_id, model_id=slot.run.id, epoch=slot.epoch, snapshot_id=files.id
            )
            if not kept:
                session.delete(session.get_one(Snapshot, files.id))
                dead = [snapshot_folder(files.id)]
            else:
                dead = log.prune_bodies(session, slot.run.id, after=slot.recovery_seq, upto=job.seq_id)
                dead += _forget_snapshot(session, previous)
        if kept:
            slot.recovery_snapshot_id, slot.recovery_seq = files.id, job.seq_id
        for key in dead:
            self._blobs.delete(key)


def _forget_snapshot(session: Session, snapshot_id: str | None) -> list[str]:
    """Delete the row of a recovery snapshot that was replaced, unless a checkpoint names it. Returns its blobs."""
    if snapshot_id is None or session.scalar(select(Checkpoint.id).where(Checkpoint.snapshot_id == snapshot_id)):
        return []
    row = session.get(Snapshot, snapshot_id)
    if row is not None:
        session.delete(row)
    return [snapshot_folder(snapshot_id)]
