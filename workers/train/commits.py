"""The commit of a cycle: results, rows and positions in one transaction, each run fenced by its epoch; then a notice.

A run whose lease was lost meanwhile changes nothing and is dropped. So is one of which a result could not be stored, or
whose commit failed: its state in memory is ahead of what was committed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import structlog
from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from app.billing import meter
from app.db import Database
from app.futures.waiters import DONE_CHANNEL
from app.runs import log
from app.storage.blobs import BlobStore
from workers import metrics
from workers.train import lease
from workers.train.bounds import Lag
from workers.train.effects import Effect
from workers.train.progress import Progress
from workers.train.residency import Residents
from workers.train.results import Stored, may_pass, store_results, used_by

logger = structlog.get_logger(__name__)


class Committer:
    """Commits what operations have become, and tells who waits for it. On the loop's thread."""

    def __init__(
        self,
        *,
        worker_id: str,
        database: Database,
        blobs: BlobStore,
        redis: Redis,
        inline_bytes: int,
        residents: Residents,
        progress: Progress,
    ) -> None:
        self._worker_id = worker_id
        self._database = database
        self._blobs = blobs
        self._redis = redis
        self._inline_bytes = inline_bytes
        self._residents = residents
        self._slots = residents.slots
        self._progress = progress

    def commit(self, effects: Sequence[Effect], *, began: float) -> None:
        """Commit effects; those of one run come in order. `began`: when their computing did (monotonic seconds).

        Raises SQLAlchemyError if the database is away; then their runs are dropped.
        """
        self._commit(store_results(effects, self._blobs, inline_bytes=self._inline_bytes), began)

    def _commit(self, stored: Mapping[str, Stored], began: float) -> None:
        try:
            with self._progress.during("commit"), self._database.write() as session:
                lost = [model_id for model_id in sorted(stored) if not self._write(session, model_id, stored[model_id])]
                committed = {model_id: mine.effects for model_id, mine in stored.items() if model_id not in lost}
                meter.add(session, used_by(committed, self._slots))
        except SQLAlchemyError as error:
            if not may_pass(error):
                logger.error("commit_refused", runs=len(stored), exc_info=error)
                self._commit_apart(stored, began)
                return
            for model_id in stored:
                self._residents.drop(model_id)
            raise
        for model_id in lost:
            self._residents.lose(model_id)
        for model_id, mine in committed.items():
            self._moved(model_id, mine, began)
            if stored[model_id].is_cut:
                self._residents.drop(model_id)
        self._notify([effect.operation.request_id for mine in committed.values() for effect in mine])

    def _write(self, session: Session, model_id: str, stored: Stored) -> bool:
        """Write what became of a run's operations. False if another worker holds the run."""
        effects = stored.effects
        values = {key: value for effect in effects for key, value in effect.run_values.items()}
        last = max(effect.operation.seq_id for effect in effects)
        epoch, worker_id = self._slots[model_id].epoch, self._worker_id
        if not lease.advance(session, worker_id=worker_id, model_id=model_id, epoch=epoch, applied_seq=last, **values):
            return False
        for effect in effects:
            for write in effect.rows:
                write(session)
        log.finish(session, stored.finished)
        return True

    def _commit_apart(self, stored: Mapping[str, Stored], began: float) -> None:
        """The database will never take these results as they are. Whose they are is found out by committing each run
        alone; one that is refused alone counts as if its pass had failed."""
        if len(stored) == 1:
            self._residents.crashed(set(stored))
            return
        for model_id in sorted(stored):
            self._commit({model_id: stored[model_id]}, began)

    def _moved(self, model_id: str, effects: Sequence[Effect], began: float) -> None:
        slot = self._slots[model_id]
        slot.applied_seq = max(effect.operation.seq_id for effect in effects)
        slot.crashes = 0
        slot.lag += Lag(
            len(effects),
            sum(effect.operation.body_bytes for effect in effects),
            sum(effect.seconds for effect in effects),
        )
        slot.note_work(began)
        for effect in effects:
            failed = effect.failure is not None or effect.operation.state == log.FAILED
            metrics.operations(effect.operation.kind, "failed" if failed else "done").inc()
            for call in effect.then:
                call()

    def _notify(self, request_ids: Sequence[str]) -> None:
        """Wake the polls. If Redis is away they find out by themselves within two seconds."""
        if not request_ids:
            return
        try:
            with self._progress.during("notify"):
                self._redis.publish(DONE_CHANNEL, "\n".join(request_ids))
        except (RedisError, OSError) as error:
            logger.warning("notice_lost", error=type(error).__name__)
