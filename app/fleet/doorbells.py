"""Doorbells: tells workers that there is work, off the event loop and never as an error of the client.

One thread per API process publishes from a bounded queue. A doorbell that cannot be sent is counted and dropped: train
loops look for work on a timer, and samplers requeue what nobody claimed.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import structlog
from celery import Celery

from app.fleet.queues import (
    SAMPLE_TASK,
    celery_settings,
    doorbells,
    operation_task,
    sample_queue,
    train_queue,
    wake_queue,
)
from app.settings import Settings

log = structlog.get_logger(__name__)

_SAMPLES_TOGETHER = 16
"""Requests that one message hands to one sampler, so that others of the pool get their share of a burst."""


@dataclass(frozen=True, slots=True)
class Doorbell:
    """One Celery message."""

    task: str
    queue: str
    args: tuple[str, ...]


class DoorbellPublisher:
    """Publishes doorbells from a thread of its own; `ring_*` return at once."""

    def __init__(self, settings: Settings, *, capacity: int = 50_000) -> None:
        self._celery = Celery("tinworks-doorbells", set_as_current=False)
        self._celery.conf.update(
            celery_settings(settings),
            task_publish_retry=False,
            broker_transport_options={"socket_connect_timeout": 1.0, "socket_timeout": 1.0, "max_retries": 1},
        )
        self._waiting: queue.Queue[Doorbell | None] = queue.Queue(capacity)
        self._thread = threading.Thread(target=self._publish_all, name="doorbells", daemon=True)
        self.lost = 0

    def start(self) -> None:
        """Start the publisher's thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Send what waits, then stop."""
        self._put(None)
        self._thread.join(timeout_s)

    def ring_train(self, *, kind: str, model_id: str, pool: str, worker_id: str | None) -> None:
        """Tell the run's worker, or the pool, that an operation was accepted."""
        where = wake_queue(worker_id) if worker_id else train_queue(pool)
        self._put(Doorbell(operation_task(kind), where, (model_id,)))

    def ring_sample(self, *, request_id: str, pool: str, worker_id: str | None = None) -> None:
        """Hand a stored sample request to this worker, or to any sampler of the pool."""
        where = wake_queue(worker_id) if worker_id else sample_queue(pool)
        self._put(Doorbell(SAMPLE_TASK, where, (request_id,)))

    def _put(self, bell: Doorbell | None) -> None:
        try:
            self._waiting.put_nowait(bell)
        except queue.Full:
            self.lost += 1

    def _publish_all(self) -> None:
        while True:
            first = self._waiting.get()
            bells, stop = self._with_what_else_waits(first)
            for bell in bells:
                self._publish(bell)
            if stop:
                return

    def _with_what_else_waits(self, first: Doorbell | None) -> tuple[list[Doorbell], bool]:
        """Everything in the queue by now. Of several rings for one run one is enough: it is heard after all of them."""
        bells: dict[tuple[str, tuple[str, ...]], Doorbell] = {}
        bell = first
        while bell is not None:
            bells.setdefault((bell.queue, bell.args), bell)
            try:
                bell = self._waiting.get_nowait()
            except queue.Empty:
                return _together(bells.values()), False
        return _together(bells.values()), True

    def _publish(self, bell: Doorbell) -> None:
        try:
            self._celery.send_task(bell.task, args=bell.args, queue=doorbells(bell.queue))
        except Exception as error:  # whatever it is, the thread goes on: train loops and samplers look by themselves
            self.lost += 1
            log.warning("doorbell_lost", task=bell.task, queue=bell.queue, error=type(error).__name__)


def _together(bells: Iterable[Doorbell]) -> list[Doorbell]:
    """The same, with the samples of one queue in as few messages as may be."""
    messages: list[Doorbell] = []
    samples: dict[str, list[str]] = {}
    for bell in bells:
        if bell.task == SAMPLE_TASK:
            samples.setdefault(bell.queue, []).extend(bell.args)
        else:
            messages.append(bell)
    for where, request_ids in samples.items():
        for start in range(0, len(request_ids), _SAMPLES_TOGETHER):
            messages.append(Doorbell(SAMPLE_TASK, where, tuple(request_ids[start : start + _SAMPLES_TOGETHER])))
    return messages
