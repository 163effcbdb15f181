"""The train loop: one thread that owns torch and turns cycles: claim → plan → execute → commit → notify.

It sleeps until a doorbell or its timer. What arrives while a cycle computes forms the next batch. Nothing that it holds
is precious: whenever it is in doubt (a commit that failed, a lease that was lost) it drops the slot, and the run is
rebuilt from its snapshot and its log.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import takewhile

import structlog
from redis import Redis
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from structlog.contextvars import bound_contextvars

from app.db import Database
from app.errors import StorageUnavailable
from app.runs import log
from app.runs.log import NewerRelease, Ready
from app.settings import Settings
from app.storage.blobs import BlobMissing, BlobStore
from app.telemetry import traces
from workers import metrics
from workers.model.engine import Engine
from workers.snapshot_folders import shared_folders
from workers.spool import Spool
from workers.threads import use_threads
from workers.train import held, lease
from workers.train.bounds import Lag
from workers.train.commits import Committer
from workers.train.effects import Bodies, Effect, share_time
from workers.train.execute import Executor, give_up
from workers.train.planner import NO_SHARES, Plan, RunQueue, plan
from workers.train.progress import Progress
from workers.train.recovery import SnapshotWriter
from workers.train.residency import Residents
from workers.train.results import may_pass
from workers.train.saves import Saver
from workers.train.shared import SharedSnapshots, SnapshotReader

logger = structlog.get_logger(__name__)

_SAVES_END_S = 10.0
_BODIES_AGAIN_S = 5.0
"""After the store could not give the bodies of a turn, it is asked for none for so long."""
_NAMED = 20
"""Requests that a line of the log names at most."""


class TrainLoop:
    """The cycles of one train worker."""

    def __init__(
        self,
        *,
        worker_id: str,
        pool: str,
        engine: Engine,
        database: Database,
        blobs: BlobStore,
        redis: Redis,
        settings: Settings,
        threads: int = 1,
    ) -> None:
        self._worker_id = worker_id
        self._pool = pool
        self._database = database
        self._blobs = blobs
        self._settings = settings
        self._threads = threads
        self._engine = engine
        folders = shared_folders(settings)
        self._shared = SharedSnapshots(folders, database, blobs) if folders is not None else None
        spool = Spool(settings.data_dir / "spool")
        quota_bytes = settings.tenant_storage_bytes
        self._saver = Saver(engine, database, blobs, spool=spool, shared=self._shared, quota_bytes=quota_bytes)
        self._saver.on_written(self.ring)
        self._executor = Executor(engine, self._saver, SnapshotReader(database, blobs, folders))
        self._writer = SnapshotWriter(database, blobs, engine, worker_id=worker_id, spool=spool)
        self._shares = NO_SHARES
        self._bodies_again = 0.0
        self._began = 0.0
        self._bell = threading.Event()
        self._stopping = threading.Event()
        self._draining = threading.Event()
        self._thread = threading.Thread(target=self._run, name="train", daemon=True)
        self.progress = Progress()
        self._residents = Residents(
            worker_id=worker_id,
            pool=pool,
            base=engine.base,
            database=database,
            blobs=blobs,
            settings=settings,
            executor=self._executor,
            writer=self._writer,
            progress=self.progress,
        )
        self._slots = self._residents.slots
        self._committer = Committer(
            worker_id=worker_id,
            database=database,
            blobs=blobs,
            redis=redis,
            inline_bytes=settings.inline_bytes,
            residents=self._residents,
            progress=self.progress,
        )

    # -- life

    def start(self) -> None:
        """Start the loop's thread."""
        if self._shared is not None:
            self._shared.start()
        self._writer.start()
        self._thread.start()

    def ring(self) -> None:
        """Wake the loop: there may be work."""
        self._bell.set()

    def drain(self, draining: bool) -> None:
        """Give every run back after the running cycle and take none, until this is undone."""
        if draining != self._draining.is_set():
            (self._draining.set if draining else self._draining.clear)()
            self._bell.set()

    def snapshot_lag(self) -> Lag:
        """What resident runs would repeat elsewhere if this worker died now: most operations and most bytes of one run,
        seconds of all together. From any thread."""
        lags = [slot.to_repeat for slot in tuple(self._slots.values())]
        return Lag(
            max((lag.operations for lag in lags), default=0),
            max((lag.body_bytes for lag in lags), default=0),
            sum(lag.seconds for lag in lags),
        )

    @property
    def has_died(self) -> bool:
        """Whether the thread has ended though nobody wanted it."""
        return self._thread.ident is not None and not self._thread.is_alive() and not self._stopping.is_set()

    def stop(self, timeout_s: float) -> None:
        """Finish the running cycle, snapshot what changed, give all leases back, as far as there is time for it. What
        is not finished by then is not worth waiting for: `lease.release_all` gives it to others."""
        deadline = time.monotonic() + timeout_s
        self._stopping.set()
        self._bell.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.warning("stopped_in_a_cycle", worker_id=self._worker_id, phase=self.progress.phase)
        for part in (self._saver, self._writer, self._shared):
            if part is not None:
                part.stop(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        use_threads(self._threads)
        while not self._stopping.is_set():
            self._wait()
            try:
                while not self._stopping.is_set() and not self._draining.is_set() and self.cycle():
                    self._residents.tidy()
                if self._draining.is_set():
                    self.hand_over()
                else:
                    self._residents.tidy()
                self._engine.idle()
            except Exception as error:
                logger.error("cycle_failed", exc_info=error)
                self._residents.drop_all()
                self._stopping.wait(self._settings.claim_interval_s)
        self._finish_saves()
        self._residents.leave()
        self._engine.close()

    def _wait(self) -> None:
        began = time.monotonic()
        self._bell.wait(self._settings.claim_interval_s)
        self._bell.clear()
        self.progress.waited_s += time.monotonic() - began

    def hand_over(self) -> None:
        """Give every run back, for other workers to take. On the loop's thread."""
        if self._slots:
            self._finish_saves()
            self._residents.evict_all()
        self._residents.give_back_forgotten()

    def _finish_saves(self) -> None:
        held.wait_for_files(self._slots, _SAVES_END_S)
        try:
            self._commit(held.take_written(self._slots))
        except SQLAlchemyError as error:
            logger.warning("saves_not_committed", error=type(error).__name__)

    # -- the cycle

    def cycle(self) -> bool:
        """One turn. False if there was nothing to do."""
        begin = self._began = time.monotonic()
        committed = self._commit(held.take_written(self._slots))
        with self.progress.during("claim"), self._database.read() as session:
            pending = log.pending_runs(session, self._pool)
            planned, bodies = self._plan(session, pending)
            absent = pending - self._slots.keys()
            free = lease.free_runs(session, absent, worker_id=self._worker_id) if absent else set()
        if free:
            with self.progress.during("restore"):
                changed = self._residents.take(free, pending)
            if changed:
                with self._database.read() as session:
                    planned, bodies = self._plan(session, pending)
        self._shares = planned.shares
        if not planned.operations:
            return committed
        if bodies is None:
            self._residents.crashed({operation.model_id for operation in planned.operations})
            return True
        try:
            with self.progress.during("pass"):
                effects = self._execute(planned, bodies)
        except Exception as error:
            request_ids = [operation.request_id for operation in planned.operations]
            logger.error("pass_failed", request_ids=request_ids[:_NAMED], count=len(request_ids), exc_info=error)
            model_ids = {operation.model_id for operation in planned.operations}
            if may_pass(error):  # nobody is to blame; all of it is done again
                for model_id in model_ids:
                    self._residents.drop(model_id)
            else:
                self._residents.crashed(model_ids)
            return True
        computed = time.monotonic()
        self._commit([*held.hold(effects, self._slots), *held.take_written(self._slots)])
        self._residents.evict_left()
        tokens, seconds = sum(operation.tokens for operation in planned.forward), time.monotonic() - begin
        runs = len({operation.model_id for operation in planned.operations})
        metrics.count_turn(seconds=computed - begin, tokens=tokens, operations=len(planned.operations), runs=runs)
        for operation in planned.operations:
            traces.record(
                operation.kind,
                operation.request_id,
                computed - begin,
                worker_id=self._worker_id,
                tokens=operation.tokens,
                operations_together=len(planned.operations),
                runs_together=runs,
            )
        logger.debug("cycle_done", operations=len(planned.operations), pass_tokens=tokens, seconds=seconds)
        return True

    def _plan(self, session: Session, pending: set[str]) -> tuple[Plan, Bodies | None]:
        """What to do next of the resident runs, least recently served first, and the bodies that it needs; None if one
        of them is lost.
        """
        waiting = sorted(pending & self._slots.keys(), key=lambda model_id: self._slots[model_id].last_used)
        positions = {model_id: held.position(self._slots[model_id]) for model_id in waiting}
        ready = log.ready_operations(session, positions) if positions else {}
        if stuck := positions.keys() - ready.keys():
            self._residents.drop_lost(session, stuck)
        if time.monotonic() < self._bodies_again:
            ready = {model_id: self._with_bodies_in_rows(operations) for model_id, operations in ready.items()}
        queues = [
            RunQueue(slot.run.id, slot.run.owner_id, held.may_go_ahead(slot, operations), slot.crashes)
            for slot, operations in ((self._slots[model_id], operations) for model_id, operations in ready.items())
        ]
        self.progress.queued_tokens = sum(o.tokens for queue in queues for o in queue.operations)
        planned = plan(queues, pass_tokens=self._settings.pass_tokens, shares=self._shares)
        self._residents.try_only({operation.model_id for operation in planned.operations})
        try:
            return planned, log.load_bodies(session, self._blobs, _with_bodies(planned))
        except BlobMissing as error:
            logger.error("body_missing", operations=len(planned.operations), exc_info=error)
            return planned, None
        except StorageUnavailable as error:  # nothing has begun; what needs no store goes on with the next turn
            logger.warning("bodies_out_of_reach", operations=len(planned.operations), reason=error.reason)
            self._bodies_again = time.monotonic() + _BODIES_AGAIN_S
            return Plan(), None

    def _with_bodies_in_rows(self, operations: Sequence[Ready]) -> list[Ready]:
        """Those before the first whose body is in the blob store."""
        small = self._settings.inline_bytes
        return list(takewhile(lambda one: one.state == log.FAILED or one.body_bytes <= small, operations))

    def _execute(self, planned: Plan, bodies: Bodies) -> list[Effect]:
        effects = [give_up(operation, self._slots[operation.model_id]) for operation in planned.poisoned]
        for operation in planned.control:
            began = time.monotonic()
            try:
                with bound_contextvars(model_id=operation.model_id, request_id=operation.request_id):
                    effect = self._executor.control(operation, self._slots[operation.model_id], bodies)
            except NewerRelease as error:
                self._residents.leave_to_newer(operation.model_id, error)
                continue
            effects += share_time([effect], since=began)
        if planned.steps_before:
            began = time.monotonic()
            effects += share_time(self._executor.step(planned.steps_before, self._slots, bodies), since=began)
        if planned.forward:
            began = time.monotonic()
            effects += share_time(self._executor.forward(planned.forward, self._slots, bodies), since=began)
        if planned.steps_after:
            began = time.monotonic()
            effects += share_time(self._executor.step(planned.steps_after, self._slots, bodies), since=began)
        return effects

    def _commit(self, effects: Sequence[Effect]) -> bool:
        """False if there was nothing to commit."""
        if not effects:
            return False
        self._committer.commit(effects, began=self._began)
        self._residents.snapshot_where_due(effects)
        return True


def _with_bodies(planned: Plan) -> list[Ready]:
    operations = planned.control + planned.steps_before + planned.forward + planned.steps_after
    return [operation for operation in operations if operation.state != log.FAILED]
