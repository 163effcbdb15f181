"""A sampling engine that does what the test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

from app.wire.types import SampleResult
from workers.sample.adapter_files import AdapterFiles
from workers.sample.adapters import AdapterStore
from workers.sample.engines.base import AdapterHandle, Cancelled, Engine, Job


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

    def load_adapter(self, snapshot_id: str, folder: Path) -> AdapterHandle:
        return snapshot_id

    def unload_adapter(self, handle: AdapterHandle) -> None:
        pass

    def on_event(self, wake: Callable[[], None]) -> None:
        pass

    def close(self) -> None:
        pass

    running = waiting = 0


def base_model_only(engine: Engine) -> AdapterStore:
    """The adapters of a sampler that is asked for none."""
    return AdapterStore(engine, cast(AdapterFiles, None), capacity=1)
