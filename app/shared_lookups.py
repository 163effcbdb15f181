"""One look-up for all who ask the same at the same time, and for those who ask a moment later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from app.recent import Recent

V = TypeVar("V")


class SharedLookups(Generic[V]):
    """Answers by key, believed for `ttl_s` seconds (0: only shared by those who wait together). One event loop's."""

    def __init__(self, *, ttl_s: float = 0.0) -> None:
        self._ttl_s = ttl_s
        self._answers: Recent[Hashable, V] = Recent(ttl_s=ttl_s)
        self._running: dict[Hashable, asyncio.Task[V]] = {}

    async def get(self, key: Hashable, look: Callable[[], Awaitable[V]]) -> V:
        """The answer, from `look` if there is none. Who gives up waiting does not stop it for the others."""
        known = self._answers.get(key)
        if known is not None:
            return known
        task = self._running.get(key)
        if task is None:
            task = asyncio.create_task(self._look(key, look))
            self._running[key] = task
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to hear it
        return await asyncio.shield(task)

    async def _look(self, key: Hashable, look: Callable[[], Awaitable[V]]) -> V:
        try:
            answer = await look()
        finally:
            del self._running[key]
        if self._ttl_s > 0:
            self._answers.put(key, answer)
        return answer
