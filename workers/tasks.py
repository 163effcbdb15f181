"""The doorbells: Celery tasks that wake this process's loops and return at once."""

from __future__ import annotations

from app.fleet.queues import OPERATION_KINDS, SAMPLE_TASK, operation_task
from workers.celery import app


def ring(model_id: str) -> None:
    """A run has work."""
    from workers import process

    process.current().ring(model_id)


for _kind in OPERATION_KINDS:
    app.task(name=operation_task(_kind), ignore_result=True)(ring)


@app.task(name=SAMPLE_TASK, ignore_result=True)
def sample(request_id: str) -> None:
    """A sample waits in Redis."""
    from workers import process

    process.current().take_sample(request_id)
