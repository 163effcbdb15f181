"""Routes samples to the samplers that have their prompts' beginnings cached, by a view of the fleet of its own.

The view of a pool is a second old at most while samples come, is renewed beside them, and costs them nothing; only the
first after a pause waits for it. What this process has sent since the view was made counts as load. With one sampler,
or none, there is nothing to choose: such samples go to their pool's queue, as they do while Redis is away.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import redis.asyncio
import structlog
from redis.exceptions import RedisError

from app.sampling.presence import SILENCE_S, Samplers
from app.sampling.routing import choose, prefix_key

log = structlog.get_logger(__name__)

_RENEW_AFTER_S = 1.0


@dataclass(slots=True)
class _View:
    """The live samplers of a pool at `at`, on this process's clock. `sent`: sequences sent to each since then, and
    `sent_before`: in the time of the view before, which the samplers may not have counted yet."""

    loads: dict[str, int] = field(default_factory=dict)
    at: float = float("-inf")
    sent: Counter[str] = field(default_factory=Counter)
    sent_before: Counter[str] = field(default_factory=Counter)

    def current(self) -> dict[str, int]:
        """What each sampler has to do, as far as is known here."""
        return {
            worker_id: load + self.sent[worker_id] + self.sent_before[worker_id]
            for worker_id, load in self.loads.items()
        }


class SampleRouter:
    """The routes of one process, on one event loop. `prefix_tokens` 0: every sample goes to its pool's queue."""

    def __init__(
        self, client: redis.asyncio.Redis, *, prefix_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._samplers = Samplers(client)
        self._prefix_tokens = prefix_tokens
        self._clock = clock
        self._views: dict[str, _View] = {}
        self._looking: dict[str, asyncio.Task[None]] = {}

    async def home(self, pool: str, snapshot_id: str | None, prompt: Sequence[int], sequences: int) -> str | None:
        """The worker that a sample goes to; None: whoever takes it from the pool's queue."""
        if not self._prefix_tokens:
            return None
        view = await self._view(pool)
        if len(view.loads) < 2:
            return None
        chosen = choose(prefix_key(snapshot_id, prompt, tokens=self._prefix_tokens), view.current())
        view.sent[chosen] += sequences
        return chosen

    async def _view(self, pool: str) -> _View:
        view = self._views.get(pool)
        if view is None:
            view = self._views[pool] = _View()
        age_s = self._clock() - view.at
        if age_s > _RENEW_AFTER_S:
            if pool not in self._looking:
                self._looking[pool] = asyncio.create_task(self._look(pool, view))
            if age_s > SILENCE_S:
                await asyncio.shield(self._looking[pool])
        return view

    async def _look(self, pool: str, view: _View) -> None:
        try:
            view.loads = await self._samplers.loads(pool)
        except (RedisError, OSError) as error:
            log.warning("samplers_unknown", pool=pool, error=type(error).__name__)
            view.loads = {}
        finally:
            view.at = self._clock()
            view.sent_before, view.sent = view.sent, Counter()
            del self._looking[pool]
