"""A sampling engine that does what the test says."""

from __future__ import annotations

import threading

from app.wire.types import SampleResult
from workers.sample.engines.base import Cancelled, Job


class HeldEngine:
    """An engine that ends a job when the test says so, or when it is cancelled."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.deaf = False
        self._ended: list[tuple[str, SampleResult | Exception]] = []
        self._lock = threading.Lock()

    def submit(self, job: Job) -> None:
        with self._lock:
            self.jobs[job.request.request_id] = job

    def cancel(self, request_id: str) -> None:
        if not self.deaf:
            self.end(request_id, Cancelled("the request was cancelled"))

    def end(self, request_id: str, outcome: SampleResult | Exception) -> None:
        with self._lock:
            self._ended.append((request_id, outcome))

    def step(self) -> bool:
        with self._lock:
            ended, self._ended = self._ended, []
            jobs = [(self.jobs.pop(request_id, None), outcome) for request_id, outcome in ended]
        for job, outcome in jobs:
            if job is not None:
                job.finish(outcome)
        return bool(ended)

    running = waiting = 0
