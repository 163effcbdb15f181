"""What a train loop is doing, for whoever watches it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Progress:
    """The phase, since when (monotonic seconds), and what waits."""

    phase: str = "idle"
    since: float = 0.0
    resident_runs: int = 0
    queued_tokens: int = 0

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The phase of this block."""
        self.phase, self.since = phase, time.monotonic()
        try:
            yield
        finally:
            self.phase, self.since = "idle", time.monotonic()
