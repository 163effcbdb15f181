"""Who is sampled next: requests wait here for their turn, which goes round the tenants. Pure.

Every tenant has a count of the tokens that were begun for it, prompts and samples alike, and the turn goes to the
tenant with the smallest count among those that wait (virtual token counters; Sheng et al., "Fairness in serving large
language models", 2024). A request counts with what it may come to at most when it begins, and with what it was when it
has ended. Who comes back after a pause is lifted to the count of those that wait: idle time is not saved up. Of one
tenant's requests the first to come is the first to go.

So while two tenants wait, neither gets more than the other but for the largest request of each, and one request of a
tenant goes before all but a few of the thousands that another has sent before it.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from app.wire.types import SampleRequest

T = TypeVar("T")


UNLIMITED_TOKENS = 4096
"""What a sample without `max_tokens` is taken to come to, until it has ended."""


def most_tokens(request: SampleRequest) -> int:
    """What a request may come to: tokens of its prompt and of all its samples."""
    limit = request.params.max_tokens
    return len(request.prompt) + request.num_samples * (UNLIMITED_TOKENS if limit is None else limit)


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """A request that waits. `tokens`: what it may come to; at least 1."""

    request_id: str
    owner_id: str
    tokens: int
    item: T


@dataclass(slots=True)
class _Tenant(Generic[T]):
    served: float = 0.0
    line: OrderedDict[str, Waiting[T]] = field(default_factory=OrderedDict)
    running: int = 0
    """Requests whose turn has come and that have not ended."""


class WaitingRoom(Generic[T]):
    """The requests of one sampler that have not begun. One thread's."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[T]] = {}
        self._waiting: dict[str, str] = {}
        self._running: dict[str, tuple[str, int]] = {}
        self._turns: list[tuple[float, str]] = []
        """Heap of tenants that wait, by what they were served; of several entries of one, its present one counts."""
        self._level = 0.0
        """The most that a tenant had been served when its turn came; who comes while nobody waits begins there."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def add(self, waiting: Waiting[T]) -> None:
        """A request came. One that waits already, or whose turn has come, changes nothing."""
        if waiting.request_id in self._waiting or waiting.request_id in self._running:
            return
        tenant = self._tenants.setdefault(waiting.owner_id, _Tenant())
        if not tenant.line:
            tenant.served = max(tenant.served, self._lowest())
        tenant.line[waiting.request_id] = waiting
        self._waiting[waiting.request_id] = waiting.owner_id
        if len(tenant.line) == 1:
            heapq.heappush(self._turns, (tenant.served, waiting.owner_id))

    def take(self, may_begin: Callable[[T], bool] = lambda item: True) -> T | None:
        """The request whose turn it is; None if nobody waits. A tenant whose first request may not begin is passed
        over, and keeps its turn."""
        passed: set[tuple[float, str]] = set()
        taken = None
        while taken is None and (turn := self._next_turn()) is not None:
            tenant = self._tenants[turn[1]]
            first = next(iter(tenant.line.values()))
            if not may_begin(first.item):
                passed.add(turn)
                continue
            taken = first
            self._level = max(self._level, tenant.served)
            self._leave_line(tenant, first.request_id)
            tenant.running += 1
            self._running[first.request_id] = first.owner_id, first.tokens
            self._charge(first.owner_id, first.tokens)
        for turn in passed:
            heapq.heappush(self._turns, turn)
        return taken.item if taken else None

    def ended(self, request_id: str, *, tokens: int) -> None:
        """A request whose turn had come is over, and was of so many tokens."""
        known = self._running.pop(request_id, None)
        if known is None:
            return
        owner_id, charged = known
        self._tenants[owner_id].running -= 1
        self._charge(owner_id, tokens - charged)
        self._forget_idle(owner_id)

    def remove(self, request_id: str) -> T | None:
        """A request that waits does so no more; None if it does not wait."""
        owner_id = self._waiting.get(request_id)
        if owner_id is None:
            return None
        removed = self._leave_line(self._tenants[owner_id], request_id)
        self._forget_idle(owner_id)
        return removed.item

    def newest(self) -> Iterator[T]:
        """Those that wait, the last to come of each tenant first, round the tenants."""
        lines = [reversed(tenant.line.values()) for tenant in self._tenants.values() if tenant.line]
        while lines:
            heads = [(line, next(line, None)) for line in lines]
            yield from (waiting.item for _, waiting in heads if waiting is not None)
            lines = [line for line, waiting in heads if waiting is not None]

    def _lowest(self) -> float:
        turn = self._next_turn()
        if turn is None:
            return self._level
        heapq.heappush(self._turns, turn)
        return turn[0]

    def _next_turn(self) -> tuple[float, str] | None:
        """Take the first valid entry off the heap."""
        while self._turns:
            served, owner_id = heapq.heappop(self._turns)
            tenant = self._tenants.get(owner_id)
            if tenant is not None and tenant.line and tenant.served == served:
                return served, owner_id
        return None

    def _charge(self, owner_id: str, tokens: int) -> None:
        tenant = self._tenants[owner_id]
        tenant.served += tokens
        if tenant.line:
            heapq.heappush(self._turns, (tenant.served, owner_id))

    def _leave_line(self, tenant: _Tenant[T], request_id: str) -> Waiting[T]:
        del self._waiting[request_id]
        return tenant.line.pop(request_id)

    def _forget_idle(self, owner_id: str) -> None:
        """A tenant is remembered while it has something here, and while it has had more than others."""
        tenant = self._tenants[owner_id]
        if not (tenant.line or tenant.running) and (tenant.served <= self._level or not self._waiting):
            del self._tenants[owner_id]
