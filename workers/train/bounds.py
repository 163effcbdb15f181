"""When a run's state is due to be saved for recovery: bounds on what would be computed again without it. Pure.

A restore repeats what a run has done since its last snapshot. In seconds of computing that is bounded by a setting, or
by so many times what a snapshot of this run takes, if that is more: then snapshots cost a fixed share of the training
however large the run or slow the store is. Runs that a worker's death would lose together share those seconds.

Adapter, moments and counters say all there is right after an optimizer step, and the gradient would be as large again
before one: so a run that is near a bound is saved behind a step, and anywhere once it has reached it.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.settings import Settings

NEAR = 0.75
"""From this part of a bound on in seconds, a run is saved behind its next step. Steps are that frequent."""
FAR = 2
"""At so many times a bound in operations or bytes, a run is saved without waiting for its step."""


@dataclass(frozen=True, slots=True)
class Lag:
    """What a restore would repeat: operations of the log, bytes of their bodies, seconds of computing."""

    operations: int = 0
    body_bytes: int = 0
    seconds: float = 0.0

    def __add__(self, other: Lag) -> Lag:
        return Lag(self.operations + other.operations, self.body_bytes + other.body_bytes, self.seconds + other.seconds)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of one worker. `cost_factor`: seconds of computing per second that a snapshot takes."""

    operations: int
    body_bytes: int
    seconds: float
    cost_factor: float

    @classmethod
    def of(cls, settings: Settings) -> Bounds:
        """Those that are configured."""
        return cls(
            operations=settings.snapshot_operations,
            body_bytes=settings.snapshot_bytes,
            seconds=settings.snapshot_seconds,
            cost_factor=settings.snapshot_cost_factor,
        )

    def is_due(self, lag: Lag, *, cost_s: float, sharers: int, after_step: bool) -> bool:
        """Whether a run shall be saved now. `cost_s`: seconds that its last snapshot took, 0 before the first.
        `sharers`: runs of the worker, this one included, that have something to repeat."""
        if after_step and (lag.operations >= self.operations or lag.body_bytes >= self.body_bytes):
            return True
        if lag.operations >= FAR * self.operations or lag.body_bytes >= FAR * self.body_bytes:
            return True
        most = max(self.seconds / max(1, sharers), self.cost_factor * cost_s)
        return lag.seconds >= most or (after_step and lag.seconds >= NEAR * most)
