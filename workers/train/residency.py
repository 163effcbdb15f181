"""Which runs are in a train worker's slots: how they come, how long they stay, how they go.

A run that leaves is rebuilt from its last snapshot and the log after it, by whichever worker takes it next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.db import Database
from app.fleet.service import STOPPING, Load, trainers_with_room, worker_seen
from app.runs import log
from app.runs.limits import held_by_owner
from app.runs.log import NewerRelease
from app.settings import Settings
from app.storage.blobs import BlobStore
from workers.metrics import RECOVERIES
from workers.model.base import BaseModel
from workers.model.memory import release as release_memory
from workers.train import lease, lease_events, placement, unrestorable
from workers.train.bounds import Bounds
from workers.train.effects import Effect
from workers.train.execute import Executor
from workers.train.lease import Lease
from workers.train.planner import STEP_KIND
from workers.train.progress import Progress
from workers.train.recovery import SnapshotWriter, restore
from workers.train.slots import Slot

logger = structlog.get_logger(__name__)

_TIDY_EVERY_S = 5.0
_LOADED = 0.5
"""A worker that waited for less than this part of the time gives up idle runs, if another has less to do."""
_LEFT_S = 60.0
"""A run that only a newer release can restore is left to its workers for so long; then it is tried again."""
_NO_MEMORY_S = 5.0
"""The same for a run for which there was no memory here."""
_TAKEN_AT_ONCE = 16
"""Runs that are restored together. What they have computed together is repeated together, and costs no more."""
_TAKING_S = 1.0
"""Runs that are being restored hold up those that are there for so long; the rest comes in the next cycle."""
_EVICTED_AT_ONCE = 4
"""Copies of states in memory at a time."""
_SNAPSHOT_S = 60.0
_GRACE = 2.0
"""Claim intervals for which a run is left to another worker. It may be busy, or about to die."""
_ALIVE = 2 / 3
"""Part of a lease within which another worker must have been seen; a live one is seen every third of it."""


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
        self._bounds = Bounds.of(settings)
        self._line: dict[str, float] = {}  # runs that wait for a slot, and since when, in the order of their arrival
        self._left: dict[str, float] = {}  # runs that are left to workers of a newer release, until when
        self._next_tidying = self._next_look = 0.0
        self._asked = time.monotonic(), 0.0  # when it was last asked how loaded we are; how long there was no work
        self.slots: dict[str, Slot] = {}

    # -- coming

    def take(self, free: set[str], pending: set[str]) -> bool:
        """Take the leases of as many free runs as there is room for, longest seen first, and rebuild their states; if
        that takes long, of some of them. `pending`: the runs that have work. False if nobody came or went."""
        now, before = time.monotonic(), set(self.slots)
        self._left = {model_id: until for model_id, until in self._left.items() if until > now}
        free = free - self._left.keys()
        self._line = {model_id: seen for model_id, seen in self._line.items() if model_id in free}
        self._line |= dict.fromkeys(sorted(free - self._line.keys()), now)
        allowed = self._within_limit(free, pending)
        wanted = self._not_for_others([model_id for model_id in self._line if model_id in allowed], now)
        room = self._settings.train_slots - len(self.slots)
        if room < len(wanted):
            room += self._make_room(len(wanted) - room, pending)
        wanted = wanted[: max(0, room)]
        for start in range(0, len(wanted), _TAKEN_AT_ONCE):
            self._take(wanted[start : start + _TAKEN_AT_ONCE], pending)
            if time.monotonic() - now > _TAKING_S:
                break
        self._progress.resident_runs = len(self.slots)
        return self.slots.keys() != before

    def _take(self, wanted: list[str], pending: set[str]) -> None:
        with self._database.write() as session:
            granted = lease.take(session, worker_id=self._worker_id, lease_s=self._settings.lease_s, model_ids=wanted)
            granted = self._without_other_suspects(session, granted)
        self._progress.moves()
        for one in granted:
            self._line.pop(one.run.id, None)
            self._note("taken", one.run.id, one.epoch, crashes=one.crashes)
        for one in filter(unrestorable.kills, granted):
            unrestorable.give_up(self._database, one, worker_id=self._worker_id)
        granted, began = [one for one in granted if not unrestorable.kills(one)], time.monotonic()
        outcomes = restore(granted, self._executor, self._database, self._blobs, self._base, begin_s=_TAKING_S)
        for one in granted:
            outcome = outcomes.get(one.run.id)
            if outcome is None:
                self._release(one.run.id, one.epoch)
            elif isinstance(outcome, Slot):
                RECOVERIES.observe(time.monotonic() - began)
                self.slots[one.run.id] = outcome
            else:
                self._not_restored(one, outcome, pending)
        self.try_only(())

    def _not_restored(self, granted: Lease, error: Exception, pending: set[str]) -> None:
        model_id = granted.run.id
        if isinstance(error, NewerRelease):
            self.leave_to_newer(model_id, error)
            self._release(model_id, granted.epoch)
            return
        logger.error("restore_failed", model_id=model_id, exc_info=error)
        fits_later = unrestorable.lacks_memory(error) and self._make_memory(model_id, pending)
        unrestorable.give_back(self._database, granted, error, worker_id=self._worker_id, passing=fits_later)

    def _make_memory(self, model_id: str, pending: set[str]) -> bool:
        """There was no memory for a run beside those that are here: let some of them go, and leave it to other workers
        for a moment. False if it was alone."""
        if not self.slots:
            return False
        self._make_room(max(1, len(self.slots) // 4), pending)
        release_memory()
        self._left[model_id] = time.monotonic() + _NO_MEMORY_S
        return True

    def _not_for_others(self, wanted: list[str], now: float) -> list[str]:
        """The runs without those that are left to other workers for a moment: all if one of them has less to do, else
        those that have no free slot here but one there. What they have not taken by then is ours. A run
        whose worker has died is left to nobody: it has waited for long enough."""
        grace_s = _GRACE * self._settings.claim_interval_s
        young = {model_id for model_id in wanted if now - self._line[model_id] < grace_s}
        if not young:
            return wanted
        with self._database.read() as session:
            others = self._others(session)
            young -= lease.runs_with_a_holder(session, young) if others else young
        room = self._settings.train_slots - len(self.slots)
        if placement.has_less_to_do(others, self._progress.queued_tokens):
            room = 0
        return [model_id for i, model_id in enumerate(wanted) if i < room or model_id not in young]

    def _others(self, session: Session) -> list[Load]:
        """The other workers that could take a run now. One that died is not among them when its leases run out."""
        seen_within_s = _ALIVE * self._settings.lease_s
        return trainers_with_room(session, self._pool, besides=self._worker_id, seen_within_s=seen_within_s)

    def _within_limit(self, free: set[str], pending: set[str]) -> set[str]:
        """The runs without those of tenants that have as many in slots as they may; others of theirs make room."""
        most = self._settings.runs_per_tenant
        if not most or not free:
            return free
        with self._database.read() as session:
            owners = lease.owners_of(session, free)
            held = held_by_owner(session, self._pool, set(owners.values()), besides=free)
        allowed: set[str] = set()
        for owner_id in set(owners.values()):
            mine = [model_id for model_id in self._line if owners.get(model_id) == owner_id]
            room = max(0, most - held.get(owner_id, 0))
            if len(mine) > room:
                room += self._make_room(len(mine) - room, pending, owner_id=owner_id)
            allowed.update(mine[:room])
        return allowed

    def _without_other_suspects(self, session: Session, granted: list[Lease]) -> list[Lease]:
        """Runs at which a worker has died once are restored with the others; one at which two have died alone, without
        anybody else, when it is first in line. The rest is given back at once: if this worker dies too, that shall
        count against the right ones.
        """
        if not granted:
            return []
        places = {model_id: place for place, model_id in enumerate(self._line)}
        first = min(granted, key=lambda one: places[one.run.id])
        kept = [first] if first.crashes > 1 else [one for one in granted if one.crashes <= 1]
        for one in granted:
            if one not in kept:
                lease.release(session, worker_id=self._worker_id, model_id=one.run.id, epoch=one.epoch)
        return kept

    def try_only(self, model_ids: Collection[str]) -> None:
        """Note which of the runs at which workers have died are tried now: these and no others. To be called before
        anything of their operations is touched."""
        suspects = [slot for slot in self.slots.values() if slot.crashes]
        changed = [slot for slot in suspects if slot.on_trial != (slot.run.id in model_ids)]
        if not changed:
            return
        with self._database.write() as session:
            for slot in sorted(changed, key=lambda slot: slot.run.id):
                fence: dict[str, Any] = {"worker_id": self._worker_id, "model_id": slot.run.id, "epoch": slot.epoch}
                lease.try_(session, **fence, begins=not slot.on_trial)
        for slot in changed:
            slot.on_trial = not slot.on_trial

    def _make_room(self, count: int, pending: set[str], *, owner_id: str | None = None) -> int:
        """Evict runs, of one tenant or of all, for others that wait: idle ones, and if that is not enough, those that
        have had their turn. Returns how many left."""
        mine = [slot for slot in self.slots.values() if owner_id in (None, slot.run.owner_id)]
        now, settings = time.monotonic(), self._settings
        leaving = placement.idle_runs(mine, pending, now=now)[:count]
        if len(leaving) < count:
            slice_s, factor = settings.slot_slice_s, settings.snapshot_cost_factor
            over = placement.runs_that_had_their_turn(mine, pending, now=now, slice_s=slice_s, cost_factor=factor)
            leaving += over[: count - len(leaving)]
        self.evict(*leaving)
        return len(leaving)

    # -- staying

    def snapshot_where_due(self, effects: Sequence[Effect]) -> None:
        """Write a snapshot of each run whose log has grown past a bound, rather after a step than within its sum."""
        stepped = {effect.operation.model_id for effect in effects if effect.operation.kind == STEP_KIND}
        touched = {effect.operation.model_id for effect in effects} & self.slots.keys()
        sharers = sum(slot.to_repeat.operations > 0 for slot in self.slots.values())
        for slot in sorted(map(self.slots.__getitem__, touched), key=lambda slot: -slot.lag.seconds):
            if self._writer.is_busy:
                return
            if slot.state is None or slot.snapshot_pending or slot.held:
                continue
            after_step = slot.run.id in stepped
            if self._bounds.is_due(slot.lag, cost_s=slot.snapshot_cost_s, sharers=sharers, after_step=after_step):
                self._writer.submit(slot)

    # -- going

    def tidy(self) -> None:
        """Now and then: give up the runs that nobody needs here. Between cycles."""
        self.give_back_forgotten()
        now = time.monotonic()
        if not self.slots or now < self._next_tidying:
            return
        self._next_tidying = now + _TIDY_EVERY_S
        self.evict_abandoned()
        if self._is_loaded(now):
            self.give_up_idle()

    def give_back_forgotten(self) -> None:
        """Now and then: give back the runs that are ours in the database and have no slot here, because it was away
        when they were dropped. Between cycles."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _TIDY_EVERY_S
        with self._database.read() as session:
            forgotten = lease.forgotten_runs(session, self.slots, worker_id=self._worker_id)
        for model_id, epoch in forgotten.items():
            self._release(model_id, epoch)

    def _is_loaded(self, now: float) -> bool:
        """Whether the worker had work for most of the time since this was asked last."""
        since, waited_s = self._asked
        self._asked = (now, self._progress.waited_s)
        return self._progress.waited_s - waited_s < _LOADED * (now - since)

    def evict_abandoned(self) -> None:
        """Free the slots of runs whose client is gone and whose queue is empty, and of those that go on with what a
        newer release has written."""
        with self._database.read() as session:
            gone = lease.abandoned_runs(session, worker_id=self._worker_id) & self.slots.keys()
            gone -= log.pending_runs(session, self._pool) if gone else gone
            gone |= log.runs_of_newer_releases(session, self.slots)
        self.evict(*(self.slots[model_id] for model_id in sorted(gone)))

    def give_up_idle(self) -> None:
        """Free the slots of idle runs that had better go on at another worker."""
        with self._database.read() as session:
            others = self._others(session)
            pending = log.pending_runs(session, self._pool) if others else set()
        queued, now = self._progress.queued_tokens, time.monotonic()
        moving = placement.runs_to_give_up(self.slots.values(), pending, others, queued_tokens=queued, now=now)
        if moving:
            logger.info("runs_given_up", worker_id=self._worker_id, count=len(moving), queued_tokens=queued)
        self.evict(*moving)

    def evict(self, *slots: Slot) -> None:
        """Snapshot runs whose logs have grown, give their leases back, free their slots. The state of one with held
        results is ahead of its position, and goes."""
        for start in range(0, len(slots), _EVICTED_AT_ONCE):
            some = slots[start : start + _EVICTED_AT_ONCE]
            self._progress.moves()
            for written in [self._save(slot) for slot in some if _has_grown(slot)]:
                written.wait(_SNAPSHOT_S)
            for slot in some:
                try:
                    self._release(slot.run.id, slot.epoch)
                except SQLAlchemyError as error:
                    logger.error("evict_failed", model_id=slot.run.id, exc_info=error)
                self.drop(slot.run.id)

    def _save(self, slot: Slot) -> threading.Event:
        try:
            return self._writer.submit(slot)
        except Exception as error:  # the log still has everything
            logger.error("evict_failed", model_id=slot.run.id, exc_info=error)
            over = threading.Event()
            over.set()
            return over

    def evict_all(self) -> None:
        """Give every run back, its state kept."""
        self.evict(*self.slots.values())

    def leave(self) -> None:
        """Give every run back, for good: nothing is left to this worker by others any more."""
        self._progress.phase = STOPPING
        try:
            with self._database.write() as session:
                worker_seen(session, self._worker_id, phase=STOPPING)
        except SQLAlchemyError as error:
            logger.warning("leaving_not_shown", error=type(error).__name__)
        self.evict_all()

    def crashed(self, model_ids: set[str]) -> None:
        """Give back the runs whose pass failed as a whole. They come back alone, and are given up at the third time."""
        for model_id in model_ids:
            slot = self.slots[model_id]
            with self._database.write() as session:
                lease.crash(session, worker_id=self._worker_id, model_id=model_id, epoch=slot.epoch)
            self._note("crashed", model_id, slot.epoch)
            self.drop(model_id)

    def leave_to_newer(self, model_id: str, error: NewerRelease) -> None:
        """Note that a run cannot go on here, but at a worker of a newer release."""
        logger.warning("left_to_newer_release", model_id=model_id, reason=str(error))
        self._left[model_id] = time.monotonic() + _LEFT_S

    def evict_left(self) -> None:
        """Give back the resident runs that cannot go on here. Between cycles."""
        self.evict(*(self.slots[model_id] for model_id in sorted(self._left.keys() & self.slots.keys())))

    def drop_lost(self, session: Session, model_ids: Iterable[str]) -> None:
        """Of runs that have work but none after our position: drop those that another worker had meanwhile."""
        epochs = {model_id: self.slots[model_id].epoch for model_id in model_ids}
        for model_id in lease.lost_runs(session, epochs, worker_id=self._worker_id):
            self.lose(model_id)

    def lose(self, model_id: str) -> None:
        """Drop a run that another worker has now."""
        if (slot := self.slots.get(model_id)) is not None:
            self._note("lost", model_id, slot.epoch)
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
        self._note("released", model_id, epoch)

    def _note(self, change: lease_events.Change, model_id: str, epoch: int, *, crashes: int = 0) -> None:
        lease_events.note(change, model_id=model_id, epoch=epoch, worker_id=self._worker_id, crashes=crashes)


def _has_grown(slot: Slot) -> bool:
    return slot.state is not None and not slot.held and slot.to_repeat.operations > 0
