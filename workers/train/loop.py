"""The train loop: one thread that owns torch and turns cycles: claim → plan → execute → commit → notify.

It sleeps until a doorbell or its timer. What arrives while a cycle computes forms the next batch. Nothing that it holds
is precious: whenever it is in doubt (a commit that failed, a lease that was lost) it drops the slot, and the run is
rebuilt from its snapshot and its log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import structlog
from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.billing import meter
from app.billing.meter import Meter
from app.db import Database
from app.futures.waiters import DONE_CHANNEL
from app.runs import log
from app.runs.log import Finished, Payload, request_id_of
from app.settings import Settings
from app.storage.blobs import BlobMissing, BlobStore
from workers.model.base import BaseModel
from workers.threads import use_threads
from workers.train import lease
from workers.train.effects import Bodies, Effect
from workers.train.execute import Executor, give_up
from workers.train.lease import Lease
from workers.train.planner import STEP_KIND, Plan, RunQueue, plan
from workers.train.recovery import SnapshotWriter, restore
from workers.train.slots import Slot

logger = structlog.get_logger(__name__)

_ABANDONED_EVERY_S = 10.0


@dataclass(slots=True)
class Progress:
    """What the loop is doing, for whoever watches it: the phase, since when, and what waits."""

    phase: str = "idle"
    since: float = 0.0
    resident_runs: int = 0
    queued_tokens: int = 0


class TrainLoop:
    """The cycles of one train worker."""

    def __init__(
        self,
        *,
        worker_id: str,
        pool: str,
        base: BaseModel,
        database: Database,
        blobs: BlobStore,
        redis: Redis,
        settings: Settings,
        threads: int = 1,
    ) -> None:
        self._worker_id = worker_id
        self._pool = pool
        self._base = base
        self._database = database
        self._blobs = blobs
        self._redis = redis
        self._settings = settings
        self._threads = threads
        self._executor = Executor(base, database, blobs, micro_batch_tokens=settings.micro_batch_tokens)
        self._writer = SnapshotWriter(database, blobs, base, worker_id=worker_id)
        self._slots: dict[str, Slot] = {}
        self._queue: list[str] = []  # runs that wait for a slot, in the order in which they were seen
        self._bell = threading.Event()
        self._stopping = threading.Event()
        self._next_abandoned = 0.0
        self._thread = threading.Thread(target=self._run, name="train", daemon=True)
        self.progress = Progress()

    # -- life

    def start(self) -> None:
        """Start the loop's thread."""
        self._writer.start()
        self._thread.start()

    def ring(self) -> None:
        """Wake the loop: there may be work."""
        self._bell.set()

    def stop(self, timeout_s: float) -> None:
        """Finish the running cycle, snapshot what changed, give all leases back."""
        self._stopping.set()
        self._bell.set()
        self._thread.join(timeout_s)
        self._writer.stop(timeout_s)

    def _run(self) -> None:
        use_threads(self._threads)
        while not self._stopping.is_set():
            self._bell.wait(self._settings.claim_interval_s)
            self._bell.clear()
            try:
                while not self._stopping.is_set() and self.cycle():
                    pass
                self._evict_abandoned()
            except Exception as error:
                logger.error("cycle_failed", exc_info=error)
                self._drop_all()
                self._stopping.wait(self._settings.claim_interval_s)
        for slot in list(self._slots.values()):
            self._evict(slot)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.progress.phase, self.progress.since = name, time.monotonic()
        try:
            yield
        finally:
            self.progress.phase, self.progress.since = "idle", time.monotonic()

    # -- the cycle

    def cycle(self) -> bool:
        """One turn. False if there was nothing to do."""
        with self._database.read() as session:
            pending = log.pending_runs(session, self._pool)
            planned, bodies = self._plan(session, pending)
            absent = pending - self._slots.keys()
            free = lease.free_runs(session, absent, worker_id=self._worker_id) if absent else set()
        if free:
            with self._phase("restore"):
                self._take(free)
            with self._database.read() as session:
                planned, bodies = self._plan(session, pending)
        if not planned.operations:
            return False
        if bodies is None:
            self._crashed({operation.model_id for operation in planned.operations})
            return True
        try:
            with self._phase("pass"):
                effects = self._execute(planned, bodies)
        except Exception as error:
            logger.error("pass_failed", operations=len(planned.operations), exc_info=error)
            self._crashed({operation.model_id for operation in planned.operations})
            return True
        self._commit(effects)
        self._snapshot_where_due(effects)
        return True

    def _plan(self, session: Session, pending: set[str]) -> tuple[Plan, Bodies | None]:
        """What to do next of the resident runs, least recently served first, and the bodies that it needs; None if one
        of them is lost.
        """
        waiting = sorted(pending & self._slots.keys(), key=lambda model_id: self._slots[model_id].last_used)
        positions = {model_id: self._slots[model_id].applied_seq for model_id in waiting}
        ready = log.ready_operations(session, positions) if positions else {}
        if stuck := positions.keys() - ready.keys():
            self._drop_lost(session, stuck)
        queues = [
            RunQueue(model_id, self._slots[model_id].run.owner_id, operations, self._slots[model_id].crashes)
            for model_id, operations in ready.items()
        ]
        self.progress.queued_tokens = sum(o.tokens for queue in queues for o in queue.operations)
        planned = plan(queues, pass_tokens=self._settings.pass_tokens)
        try:
            return planned, log.load_bodies(session, self._blobs, _keys_with_bodies(planned))
        except BlobMissing as error:
            logger.error("body_missing", operations=len(planned.operations), exc_info=error)
            return planned, None

    def _drop_lost(self, session: Session, model_ids: Iterable[str]) -> None:
        """Of runs that have work but none after our position: drop those that another worker had meanwhile."""
        epochs = {model_id: self._slots[model_id].epoch for model_id in model_ids}
        for model_id in lease.lost_runs(session, epochs, worker_id=self._worker_id):
            logger.warning("lease_lost", model_id=model_id, worker_id=self._worker_id)
            self._drop(model_id)

    def _take(self, free: set[str]) -> None:
        room = self._settings.train_slots - len(self._slots)
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
        for one in granted:
            self._queue.remove(one.run.id)
            try:
                self._slots[one.run.id] = restore(one, self._executor, self._database, self._blobs, self._base)
            except Exception as error:
                logger.error("restore_failed", model_id=one.run.id, exc_info=error)
                self._release(one.run.id, one.epoch)
        self.progress.resident_runs = len(self._slots)

    def _with_one_suspect(self, session: Session, granted: list[Lease]) -> list[Lease]:
        """Hold one run at a time at which a worker has died, and only if it has work; give the others back at once.

        Else the next death would count against all of them, and the third would fail operations that never ran.
        """
        suspects = {one.run.id: one.run.applied_seq for one in granted if one.crashes}
        if not suspects:
            return granted
        ready = log.ready_operations(session, suspects, limit=1)
        held = next((slot.run.id for slot in self._slots.values() if slot.crashes), None)
        kept = held or next((model_id for model_id in self._queue if model_id in ready), None)
        for one in granted:
            if one.crashes and one.run.id != kept:
                lease.release(session, worker_id=self._worker_id, model_id=one.run.id, epoch=one.epoch)
        return [one for one in granted if not one.crashes or one.run.id == kept]

    def _make_room(self, count: int) -> int:
        """Evict idle runs, least recently used first; returns how many left."""
        with self._database.read() as session:
            pending = log.pending_runs(session, self._pool)
        idle = sorted(
            (slot for slot in self._slots.values() if slot.run.id not in pending), key=lambda slot: slot.last_used
        )
        for slot in idle[:count]:
            self._evict(slot)
        return min(count, len(idle))

    def _execute(self, planned: Plan, bodies: Bodies) -> list[Effect]:
        effects = [give_up(operation, self._slots[operation.model_id]) for operation in planned.poisoned]
        for operation in planned.control:
            effects.append(self._executor.control(operation, self._slots[operation.model_id], bodies))
        if planned.steps_before:
            effects += self._executor.step(planned.steps_before, self._slots, bodies)
        if planned.forward:
            effects += self._executor.forward(planned.forward, self._slots, bodies)
        if planned.steps_after:
            effects += self._executor.step(planned.steps_after, self._slots, bodies)
        return effects

    def _commit(self, effects: Sequence[Effect]) -> None:
        """Results, rows and positions in one transaction, each run fenced by its epoch; then tell the waiting polls."""
        by_run: dict[str, list[Effect]] = {}
        for effect in effects:
            by_run.setdefault(effect.operation.model_id, []).append(effect)
        finished = {model_id: [self._finished(e) for e in mine] for model_id, mine in by_run.items()}
        done: list[str] = []
        lost: list[str] = []
        try:
            with self._database.write() as session:
                for model_id in sorted(by_run):
                    slot, mine = self._slots[model_id], by_run[model_id]
                    last = max(effect.operation.seq_id for effect in mine)
                    values = {key: value for effect in mine for key, value in effect.run_values.items()}
                    if not lease.advance(
                        session,
                        worker_id=self._worker_id,
                        model_id=model_id,
                        epoch=slot.epoch,
                        applied_seq=last,
                        **values,
                    ):
                        lost.append(model_id)
                        continue
                    for effect in mine:
                        for write in effect.rows:
                            write(session)
                    log.finish(session, [outcome for outcome in finished[model_id] if outcome is not None])
                    done += [request_id_of(model_id, effect.operation.seq_id) for effect in mine]
                meter.add(session, self._used({model_id: by_run[model_id] for model_id in by_run.keys() - lost}))
        except SQLAlchemyError:
            for model_id in by_run:
                self._drop(model_id)
            raise
        for model_id in lost:
            logger.warning("lease_lost", model_id=model_id, worker_id=self._worker_id)
            self._drop(model_id)
        self._moved(by_run, lost)
        self._notify(done)

    def _used(self, by_run: dict[str, list[Effect]]) -> dict[Meter, int]:
        """What the committed operations used."""
        hour = meter.this_hour()
        runs = {model_id: self._slots[model_id].run for model_id in by_run}
        return meter.summed(
            (Meter(run.owner_id, hour, run.session_id, run.base_model, kind), amount)
            for model_id, run in runs.items()
            for effect in by_run[model_id]
            for kind, amount in effect.usage.items()
        )

    def _moved(self, by_run: dict[str, list[Effect]], lost: Sequence[str]) -> None:
        for model_id, mine in by_run.items():
            if model_id in lost:
                continue
            slot = self._slots[model_id]
            slot.applied_seq = max(effect.operation.seq_id for effect in mine)
            slot.crashes = 0
            slot.log_operations += len(mine)
            slot.log_bytes += sum(effect.operation.body_bytes for effect in mine)
            slot.last_used = time.monotonic()

    def _finished(self, effect: Effect) -> Finished | None:
        operation = effect.operation
        if operation.state == log.FAILED:
            return None
        if effect.failure is not None:
            return Finished(operation.model_id, operation.seq_id, failure=effect.failure)
        payload = Payload.store(
            effect.result or b"{}", self._blobs, folder="results", inline_bytes=self._settings.inline_bytes
        )
        return Finished(operation.model_id, operation.seq_id, result=payload, result_kind=effect.result_kind)

    def _notify(self, request_ids: Sequence[str]) -> None:
        """Wake the polls. If Redis is away they find out by themselves within two seconds."""
        if not request_ids:
            return
        try:
            self._redis.publish(DONE_CHANNEL, "\n".join(request_ids))
        except (RedisError, OSError) as error:
            logger.warning("notice_lost", error=type(error).__name__)

    # -- snapshots and eviction

    def _snapshot_where_due(self, effects: Sequence[Effect]) -> None:
        stepped = {effect.operation.model_id for effect in effects if effect.operation.kind == STEP_KIND}
        for model_id in {effect.operation.model_id for effect in effects} & self._slots.keys():
            slot, settings = self._slots[model_id], self._settings
            if slot.state is None or slot.snapshot_pending:
                continue
            over = slot.log_operations >= settings.snapshot_operations or slot.log_bytes >= settings.snapshot_bytes
            far_over = slot.log_operations >= 2 * settings.snapshot_operations
            if (over and model_id in stepped) or far_over or slot.log_bytes >= 2 * settings.snapshot_bytes:
                self._writer.submit(slot)

    def _evict_abandoned(self) -> None:
        """Free the slots of runs whose client is gone and whose queue is empty."""
        now = time.monotonic()
        if not self._slots or now < self._next_abandoned:
            return
        self._next_abandoned = now + _ABANDONED_EVERY_S
        with self._database.read() as session:
            silence_s = self._settings.session_silence_s
            gone = lease.abandoned_runs(session, worker_id=self._worker_id, silence_s=silence_s)
            gone -= log.pending_runs(session, self._pool)
        for model_id in gone & self._slots.keys():
            self._evict(self._slots[model_id])

    def _evict(self, slot: Slot) -> None:
        """Snapshot a run if its log has grown, give its lease back, free its slot."""
        try:
            if slot.state is not None and (slot.log_operations or slot.snapshot_pending):
                self._writer.write_now(slot)
            self._release(slot.run.id, slot.epoch)
        except Exception as error:
            logger.error("evict_failed", model_id=slot.run.id, exc_info=error)
        self._drop(slot.run.id)

    def _crashed(self, model_ids: set[str]) -> None:
        """Give back the runs whose pass failed as a whole. They come back alone, and are given up at the third time."""
        for model_id in model_ids:
            slot = self._slots[model_id]
            with self._database.write() as session:
                lease.crash(session, worker_id=self._worker_id, model_id=model_id, epoch=slot.epoch)
            self._drop(model_id)

    def _release(self, model_id: str, epoch: int) -> None:
        with self._database.write() as session:
            lease.release(session, worker_id=self._worker_id, model_id=model_id, epoch=epoch)

    def _drop(self, model_id: str) -> None:
        self._slots.pop(model_id, None)
        self.progress.resident_runs = len(self._slots)

    def _drop_all(self) -> None:
        """Forget everything and give it back, so that the next cycle begins from the log."""
        for slot in list(self._slots.values()):
            try:
                self._release(slot.run.id, slot.epoch)
            except SQLAlchemyError as error:
                logger.warning("release_failed", model_id=slot.run.id, error=type(error).__name__)
            self._drop(slot.run.id)


def _keys_with_bodies(planned: Plan) -> list[tuple[str, int]]:
    operations = planned.control + planned.steps_before + planned.forward + planned.steps_after
    return [(o.model_id, o.seq_id) for o in operations if o.state != log.FAILED]
