"""Requests of one tenant per second: a token bucket each, in the memory of every web process.

What trains, samples, polls or keeps a session alive is not counted. The SDK would leave a gap in a run's sequence, or
give a run up, where it is told 429; these requests have queues of their own, with limits of their own (WIRE §1).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from app.errors import TooBusy

RESERVE_S = 10.0
"""A tenant that has been quiet may send at once what comes to so many seconds."""
_MOST_TENANTS = 10_000
UNCOUNTED = frozenset(
    f"/api/v1/{name}"
    for name in (
        "asample",
        "cancel_future",
        "create_custom_loss",
        "create_model",
        "forward",
        "forward_backward",
        "load_weights",
        "optim_step",
        "retrieve_future",
        "retrieve_futures",
        "save_weights",
        "save_weights_external",
        "save_weights_for_sampler",
        "session_heartbeat",
        "unload_model",
    )
)
"""Paths that are never refused for their number."""


class TooManyRequests(TooBusy):
    """More requests per second than one tenant may send. `wait_s`: when the next may come, in whole seconds."""

    def __init__(self, per_s: float, wait_s: int) -> None:
        super().__init__(f"more than {per_s:g} requests per second; try again in {wait_s} s")
        self.headers = {"Retry-After": str(wait_s)}


class RateLimit:
    """The buckets of one process. `per_s` 0: no limit. One event loop's."""

    def __init__(self, per_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._most = max(1.0, per_s * RESERVE_S)
        self._clock = clock
        self._buckets: dict[str, tuple[float, float]] = {}
        """Tenant → tokens, and when they were counted."""

    def take(self, owner_id: str, path: str) -> None:
        """Count a request. Raises TooManyRequests; a request that is refused is not counted."""
        if not self._per_s or path in UNCOUNTED:
            return
        now = self._clock()
        tokens, counted_at = self._buckets.get(owner_id, (self._most, now))
        tokens = min(self._most, tokens + (now - counted_at) * self._per_s)
        if tokens < 1:
            raise TooManyRequests(self._per_s, max(1, math.ceil((1 - tokens) / self._per_s)))
        if len(self._buckets) >= _MOST_TENANTS and owner_id not in self._buckets:
            self._forget_the_quiet(now)
        self._buckets[owner_id] = tokens - 1, now

    def _forget_the_quiet(self, now: float) -> None:
        """Whose bucket is full again need not be remembered."""
        self._buckets = {
            owner_id: (tokens, at)
            for owner_id, (tokens, at) in self._buckets.items()
            if tokens + (now - at) * self._per_s < self._most
        }
