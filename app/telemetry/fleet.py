"""What database and Redis know of queues and workers, collected when somebody looks at the metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import redis
import structlog
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from redis.exceptions import RedisError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError

from app.db import Database
from app.fleet.models import Model
from app.fleet.overview import PoolQueue, SeenWorker, seen_workers, training_queues
from app.sampling.keys import unfinished_key
from app.settings import Settings
from app.telemetry.exposition import merged

log = structlog.get_logger(__name__)

STATES = ("ready", "draining", "drained", "silent")
_BELIEVED_S = 1.0
"""However many look at the same time, the database is asked once in so long."""


class FleetCollector(Collector):
    """Figures of the whole fleet. Of a store that does not answer it shows nothing but that."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._silence_s = settings.worker_silence_s
        self._redis: Any = redis.Redis.from_url(settings.redis_url, socket_connect_timeout=1.0, socket_timeout=2.0)
        self._lock = threading.Lock()
        self._shown: list[Metric] = []
        self._pools: list[str] = []
        self._at = float("-inf")

    def describe(self) -> list[Metric]:
        """Nothing, so that registering asks no database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """All families, at most a second old."""
        with self._lock:
            if time.monotonic() - self._at > _BELIEVED_S:
                self._shown = [*self._of_database(), *self._of_redis()]
                self._at = time.monotonic()
            shown = self._shown
        yield from shown

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def _of_database(self) -> list[Metric]:
        up = GaugeMetricFamily("tinworks_database_up", "Whether this process reaches the database")
        try:
            with self._database.read() as session:
                queues, workers = training_queues(session), seen_workers(session, silence_s=self._silence_s)
                self._pools = list(session.scalars(select(Model.pool).order_by(Model.pool)))
        except SQLAlchemyError as error:
            log.warning("metrics_without_database", error=type(error).__name__)
            up.add_metric([], 0)
            return [up]
        up.add_metric([], 1)
        packed = (({"worker": worker.id, "pool": worker.pool}, worker.packed) for worker in workers)
        return [up, *_of_queues(queues), _of_workers(workers), *merged(packed)]

    def _of_redis(self) -> list[Metric]:
        up = GaugeMetricFamily("tinworks_redis_up", "Whether this process reaches Redis")
        waiting = GaugeMetricFamily("tinworks_unfinished_samples", "Samples that have not ended", labels=["pool"])
        age = GaugeMetricFamily("tinworks_sample_age_seconds", "How long a sample has had no sampler", labels=["pool"])
        try:
            seconds, microseconds = self._redis.time()
            now = seconds + microseconds / 1e6
            for pool in self._pools:
                key = unfinished_key(pool)
                waiting.add_metric([pool], float(self._redis.zcard(key)))
                oldest = self._redis.zrangebyscore(key, 1, now, 0, 1, withscores=True)
                age.add_metric([pool], max(0.0, now - oldest[0][1]) if oldest else 0.0)
        except (RedisError, OSError) as error:
            log.warning("metrics_without_redis", error=type(error).__name__)
            up.add_metric([], 0)
            return [up]
        up.add_metric([], 1)
        return [up, waiting, age]


def _of_queues(queues: list[PoolQueue]) -> list[Metric]:
    depth = GaugeMetricFamily("tinworks_queue_operations", "Operations that were accepted", labels=["pool"])
    age = GaugeMetricFamily("tinworks_queue_age_seconds", "Age of the oldest of them", labels=["pool"])
    alone = GaugeMetricFamily("tinworks_queue_runs", "Runs that have some, and no worker", labels=["pool"])
    held = GaugeMetricFamily("tinworks_held_runs", "Runs that a worker holds", labels=["pool"])
    for queue in queues:
        depth.add_metric([queue.pool], queue.operations)
        age.add_metric([queue.pool], queue.age_s)
        alone.add_metric([queue.pool], queue.runs_without_worker)
        held.add_metric([queue.pool], queue.runs_held)
    return [depth, age, alone, held]


def _of_workers(workers: list[SeenWorker]) -> Metric:
    family = GaugeMetricFamily("tinworks_workers", "Workers by what they are", labels=["pool", "role", "state"])
    counts: dict[tuple[str, str, str], int] = {}
    for worker in workers:
        state = worker.state if worker.state in STATES else "ready"
        for role in worker.roles:
            counts[worker.pool, role, state] = counts.get((worker.pool, role, state), 0) + 1
    for labels, count in sorted(counts.items()):
        family.add_metric(list(labels), count)
    return family
