"""Which runs are in a train worker's slots: how they come, how long they stay, how they go.

A run that leaves is rebuilt from its last snapshot and the log after it, by whichever worker takes it next.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from structlog.contextvars import bound_contextvars

from app.db import Database
from app.runs import log
from app.runs.limits import held_by_owner
from app.settings import Settings
from app.storage.blobs import BlobStore
from workers.metrics import LEASES, RECOVERIES
from workers.model.base import BaseModel
from workers.train import lease
from workers.train.effects import Effect
from workers.train.execute import Executor
from workers.train.lease import Lease
from workers.train.planner import STEP_KIND
from workers.train.progress import Progress
from workers.train.recovery import SnapshotWriter, restore
from workers.train.slots import Slot

logger = structlog.get_logger(__name__)

_ABANDONED_EVERY_S = 10.0


class Residents:
    """The runs of one worker, used by its train loop's thread only."""

    def __init__(
        self,
        *,
        worker_id: str,
        pool: str,
        base: BaseModel,
        database: Database,
        blobs: BlobStore,
        settings: Settings,
        executor: Executor,
        writer: SnapshotWriter,
        progress: Progress,
    ) -> None:
        self._worker_id = worker_id
        self._pool = pool
        self._base = base
        self._database = database
        self._blobs = blobs
        self._settings = settings
        self._executor = executor
        self._writer = writer
        self._progress = progress
        self._queue: list[str] = []  # runs that wait for a slot, in the order in which they were seen
        self._next_abandoned = 0.0
        self.slots: dict[str, Slot] = {}

    # -- coming

    def take(self, free: set[str]) -> None:
        """Take the leases of as many free runs as there is room for, longest seen first, and rebuild their states."""
        free = self._within_limit(free)
        room = self._settings.train_slots - len(self.slots)
        if room < len(free):
            room += self._make_room(len(free) - room)
        self._queue = [model_id for model_id in self._queue if model_id in free]
        self._queue += sorted(free - set(self._queue))
        wanted = self._queue[: max(0, room)]
        if not wanted:
            return
        with self._database.write() as session:
            granted = lease.take(session, worker_id=self._worker_id, lease_s=self._settings.lease_s, model_ids=wanted)
            granted = self._with_one_suspect(session, granted)
        LEASES.labels("taken").inc(len(granted))
        for one in granted:
            self._queue.remove(one.run.id)
            try:
                with bound_contextvars(model_id=one.run.id), RECOVERIES.time():
                    self.slots[one.run.id] = restore(one, self._executor, self._database, self._blobs, self._base)
            except Exception as error:
                logger.error("restore_failed", model_id=one.run.id, exc_info=error)
                self._release(one.run.id, one.epoch)
        self._progress.resident_runs = len(self.slots)

    def _within_limit(self, free: set[str]) -> set[str]:
        """The runs without those of tenants that have as many in slots as they may; idle ones of theirs make room."""
        most = self._settings.runs_per_tenant
        if not most or not free:
            return free
        with self._database.read() as session:
            owners = lease.owners_of(session, free)
            held = held_by_owner(session, self._pool, set(owners.values()), besides=free)
            pending = log.pending_runs(session, self._pool) if any(n >= most for n in held.values()) else set()
        allowed: set[str] = set()
        for owner_id in set(owners.values()):
            mine = sorted(model_id for model_id in free if owners.get(model_id) == owner_id)
            room = max(0, most - held.get(owner_id, 0))
            if len(mine) > room:
                room += self._evict_idle(len(mine) - room, pending, owner_id=owner_id)
            mine.sort(key=lambda model_id: self._queue.index(model_id) if model_id in self._queue else len(self._queue))
            allowed.update(mine[:room])
        return allowed

    def _with_one_suspect(self, session: Session, granted: list[Lease]) -> list[Lease]:
        """Hold one run at a time at which a worker has died, and only if it has work; give the others back at once.

        Else the next death would count against all of them, and the third would fail operations that never ran.
        """
        suspects = {one.run.id: one.run.applied_seq for one in granted if one.crashes}
        if not suspects:
            return granted
        ready = log.ready_operations(session, suspects, limit=1)
        held = next((slot.run.id for slot in self.slots.values() if slot.crashes), None)
        kept = held or next((model_id for model_id in self._queue if model_id in ready), None)
        for one in granted:
            if one.crashes and one.run.id != kept:
                lease.release(session, worker_id=self._worker_id, model_id=one.run.id, epoch=one.epoch)
        return [one for one in granted if not one.crashes or one.run.id == kept]

    def _make_room(self, count: int) -> int:
        """Evict idle runs, least recently used first; returns how many left."""
        with self._database.read() as session:
            pending = log.pending_runs(session, self._pool)
        return self._evict_idle(count, pending)

    def _evict_idle(self, count: int, pending: set[str], *, owner_id: str | None = None) -> int:
        mine = (slot for slot in self.slots.values() if owner_id in (None, slot.run.owner_id))
        idle = sorted((slot for slot in mine if slot.run.id not in pending), key=lambda slot: slot.last_used)
        for slot in idle[:count]:
            self.evict(slot)
        return min(count, len(idle))

    # -- staying

    def snapshot_where_due(self, effects: Sequence[Effect]) -> None:
        """Write a snapshot of each run whose log has grown past a bound, rather after a step than within its sum."""
        stepped = {effect.operation.model_id for effect in effects if effect.operation.kind == STEP_KIND}
        for model_id in {effect.operation.model_id for effect in effects} & self.slots.keys():
            slot, settings = self.slots[model_id], self._settings
            if slot.state is None or slot.snapshot_pending or slot.held:
                continue
            over = slot.log_operations >= settings.snapshot_operations or slot.log_bytes >= settings.snapshot_bytes
            far_over = slot.log_operations >= 2 * settings.snapshot_operations
            if (over and model_id in stepped) or far_over or slot.log_bytes >= 2 * settings.snapshot_bytes:
                self._writer.submit(slot)

    # -- going

    def evict_abandoned(self) -> None:
        """Free the slots of runs whose client is gone and whose queue is empty."""
        now = time.monotonic()
        if not self.slots or now < self._next_abandoned:
            return
        self._next_abandoned = now + _ABANDONED_EVERY_S
        with self._database.read() as session:
            silence_s = self._settings.session_silence_s
            gone = lease.abandoned_runs(session, worker_id=self._worker_id, silence_s=silence_s)
            gone -= log.pending_runs(session, self._pool)
        for model_id in gone & self.slots.keys():
            self.evict(self.slots[model_id])

    def evict(self, slot: Slot) -> None:
        """Snapshot a run if its log has grown, give its lease back, free its slot. The state of one with held results
        is ahead of its position, and goes."""
        try:
            if slot.state is not None and not slot.held and (slot.log_operations or slot.snapshot_pending):
                self._writer.write_now(slot)
            self._release(slot.run.id, slot.epoch)
        except Exception as error:
            logger.error("evict_failed", model_id=slot.run.id, exc_info=error)
        self.drop(slot.run.id)

    def evict_all(self) -> None:
        """Give every run back, its state kept."""
        for slot in list(self.slots.values()):
            self.evict(slot)

    def crashed(self, model_ids: set[str]) -> None:
        """Give back the runs whose pass failed as a whole. They come back alone, and are given up at the third time."""
        for model_id in model_ids:
            slot = self.slots[model_id]
            with self._database.write() as session:
                lease.crash(session, worker_id=self._worker_id, model_id=model_id, epoch=slot.epoch)
            LEASES.labels("crashed").inc()
            self.drop(model_id)

    def drop_lost(self, session: Session, model_ids: Iterable[str]) -> None:
        """Of runs that have work but none after our position: drop those that another worker had meanwhile."""
        epochs = {model_id: self.slots[model_id].epoch for model_id in model_ids}
        for model_id in lease.lost_runs(session, epochs, worker_id=self._worker_id):
            self.lose(model_id)

    def lose(self, model_id: str) -> None:
        """Drop a run that another worker has now."""
        logger.warning("lease_lost", model_id=model_id, worker_id=self._worker_id)
        LEASES.labels("lost").inc()
        self.drop(model_id)

    def drop(self, model_id: str) -> None:
        """Forget a run's state; its lease is as it was."""
        self.slots.pop(model_id, None)
        self._progress.resident_runs = len(self.slots)

    def drop_all(self) -> None:
        """Forget everything and give it back, so that the next cycle begins from the log."""
        for slot in list(self.slots.values()):
            try:
                self._release(slot.run.id, slot.epoch)
            except SQLAlchemyError as error:
                logger.warning("release_failed", model_id=slot.run.id, error=type(error).__name__)
            self.drop(slot.run.id)

    def _release(self, model_id: str, epoch: int) -> None:
        with self._database.write() as session:
            lease.release(session, worker_id=self._worker_id, model_id=model_id, epoch=epoch)
        LEASES.labels("released").inc()
