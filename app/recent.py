"""Answers that are remembered for a while, and then forgotten."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """Values by key, each believed for `ttl_s` seconds after it was put. Those that nobody believes any more leave when
    the next one comes, and the oldest leave beyond `most`: what was asked once does not stay. Any thread may `get`, one
    at a time may `put`.
    """

    def __init__(self, *, ttl_s: float, most: int = 10_000, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = ttl_s
        self._most = most
        self._clock = clock
        self._kept: OrderedDict[K, tuple[V, float]] = OrderedDict()  # in the order in which they were put

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K) -> V | None:
        """The value, if it is still believed."""
        value, until = self._kept.get(key, (None, 0.0))
        return value if until > self._clock() else None

    def put(self, key: K, value: V) -> None:
        """Remember a value, which is not None."""
        now = self._clock()
        self._kept.pop(key, None)
        while self._kept and (len(self._kept) >= self._most or next(iter(self._kept.values()))[1] <= now):
            self._kept.popitem(last=False)
        self._kept[key] = value, now + self._ttl_s
