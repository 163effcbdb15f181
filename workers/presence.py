"""The thread that shows that a worker is alive, on a database connection of its own.

It renews the worker's leases and its row, packs its metrics into that row, hears there whether the worker shall drain,
and ends a process whose train loop hangs or has died: it would keep its runs for ever.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app import alive
from app.db import Database
from app.fleet import service as fleet
from app.fleet.service import STOPPING
from app.settings import Settings
from app.telemetry.exposition import pack
from workers import metrics
from workers.train import lease
from workers.train.loop import TrainLoop
from workers.train.progress import IDLE

logger = structlog.get_logger(__name__)

_STOP_TIMEOUT_S = 20.0
_PACK_EVERY_S = 5.0
HUNG_EXIT_CODE = 70


class Shown(Protocol):
    """The worker, as far as it is shown."""

    worker_id: str
    train: TrainLoop | None

    @property
    def is_empty(self) -> bool:
        """Whether it holds no run and no sample."""

    def register(self, session: Session) -> None:
        """Write its row anew."""

    def drain(self, draining: bool) -> None:
        """Give everything to others, or take work again."""


class Presence:
    """Shows one worker. `draining`: what its row said when it was last read."""

    def __init__(self, worker: Shown, settings: Settings) -> None:
        self._worker = worker
        self._settings = settings
        self._database = Database(settings.database_url, pool_size=1)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)
        self._next_packing = 0.0
        self.draining = False

    def start(self) -> None:
        """Start the thread."""
        alive.touch(self._settings)
        self._thread.start()

    def stop(self) -> None:
        """Stop, give back what the worker still holds, and delete its row: it leaves on purpose."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_TIMEOUT_S)
        try:
            with self._database.write() as session:
                if self._worker.train:
                    lease.release_all(session, worker_id=self._worker.worker_id)
                fleet.remove_worker(session, self._worker.worker_id)
        except SQLAlchemyError as error:
            logger.warning("worker_not_removed", error=type(error).__name__)
        self._database.dispose()

    def _run(self) -> None:
        while not self._stopping.wait(self._settings.lease_s / 3):
            self._end_if_hung()
            alive.touch(self._settings)
            try:
                self.beat()
                self.show_metrics()
            except SQLAlchemyError as error:
                logger.warning("presence_failed", error=type(error).__name__)
            except Exception as error:  # the leases are lost without this thread, whatever else is wrong
                logger.error("presence_failed", exc_info=error)

    def _end_if_hung(self) -> None:
        if (train := self._worker.train) is None:
            return
        phase, since, most_s = train.progress.phase, train.progress.since, self._settings.max_pass_s
        if phase != IDLE and phase != STOPPING and time.monotonic() - since > most_s:
            logger.error("train_loop_hung", phase=phase, seconds=most_s)
        elif train.has_died:
            logger.error("train_loop_died", phase=phase)
        else:
            return
        os._exit(HUNG_EXIT_CODE)

    def beat(self) -> None:
        """Show once that the worker lives, and tell it whether it shall drain. Raises SQLAlchemyError."""
        values = self._values()
        with self._database.write() as session:
            if self._worker.train:
                lease.renew(session, worker_id=self._worker.worker_id, lease_s=self._settings.lease_s)
            draining = fleet.worker_seen(session, self._worker.worker_id, **values)
            if draining is None:
                self._worker.register(session)
        if draining is not None and draining != self.draining:
            self.draining = draining
            logger.info("draining" if draining else "undrained", worker_id=self._worker.worker_id)
            self._worker.drain(draining)

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {"phase": "ready"}
        if train := self._worker.train:
            values = {
                "phase": train.progress.phase,
                "resident_runs": train.progress.resident_runs,
                "queued_tokens": train.progress.queued_tokens,
            }
        if self.draining:
            values["phase"] = "drained" if self._worker.is_empty else "draining"
        return values

    def show_metrics(self) -> None:
        """Pack what was measured into the worker's row, if that was a while ago. Raises SQLAlchemyError."""
        if time.monotonic() < self._next_packing:
            return
        self._next_packing = time.monotonic() + _PACK_EVERY_S
        if train := self._worker.train:
            metrics.SLOTS.set(self._settings.train_slots)
            metrics.RESIDENT.set(train.progress.resident_runs)
            lag = train.snapshot_lag()
            metrics.SNAPSHOT_LAG.set(lag.operations)
            metrics.SNAPSHOT_LAG_BYTES.set(lag.body_bytes)
            metrics.SNAPSHOT_LAG_SECONDS.set(lag.seconds)
        with self._database.write() as session:
            fleet.worker_seen(session, self._worker.worker_id, detail={"metrics": pack(metrics.REGISTRY)})
