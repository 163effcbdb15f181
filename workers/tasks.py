"""The doorbells: Celery tasks that wake this process's loops and return at once."""

from __future__ import annotations

from celery.worker.request import Request

from app.fleet.queues import OPERATION_KINDS, SAMPLE_TASK, operation_task
from workers.celery import app


class Ring(Request):
    """A message of a queue without acknowledgement (`no_ack`): there is nothing to take back from Redis."""

    def acknowledge(self) -> None:
        """Note that the message is done with; Celery would spend a round trip on it."""
        self.acknowledged = True


def ring(model_id: str) -> None:
    """A run has work."""
    from workers import process

    process.current().ring(model_id)


for _kind in OPERATION_KINDS:
    app.task(name=operation_task(_kind), ignore_result=True, Request=Ring)(ring)


@app.task(name=SAMPLE_TASK, ignore_result=True, Request=Ring)
def sample(*request_ids: str) -> None:
    """Samples wait in Redis."""
    from workers import process

    process.current().take_samples(request_ids)
