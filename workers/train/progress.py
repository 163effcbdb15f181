"""What a train loop is doing, for whoever watches it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from workers.metrics import phase_seconds

IDLE = "idle"


@dataclass(slots=True)
class Progress:
    """The phase, since when (monotonic seconds), and what waits. `waited_s`: for how long in all there was no work."""

    phase: str = IDLE
    since: float = 0.0
    resident_runs: int = 0
    queued_tokens: int = 0
    waited_s: float = 0.0

    def moves(self) -> None:
        """The phase takes long, but goes on."""
        self.since = time.monotonic()

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """The phase of this block; after it, what was before."""
        before, began = self.phase, time.monotonic()
        self.phase, self.since = phase, began
        try:
            yield
        finally:
            now = time.monotonic()
            self.phase, self.since = before, now
            phase_seconds(phase).inc(now - began)
