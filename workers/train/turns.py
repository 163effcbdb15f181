"""Whose turn it is in a pass: deficit round robin between tenants, by tokens. Pure, as the planner is.

Each tenant counts the tokens by which it is *ahead* of one who comes now, and the least ahead is next, operation by
operation. A lead is at most about half a budget, so that a newcomer is never owed more than that, and nobody pays for
what it used while nobody else wanted it. Within a tenant runs go in the order given; a run goes on until its group of
operations ends, so that the chunks of one call meet in one pass and the step behind them follows in the same cycle.

A tenant whose next operation does not fit into what is left of the budget is passed over, and others may go before it,
but nobody gets ahead of it by more than that operation. The first operation of a pass is taken whatever its size.

A pass ends early where it would only grow for tenants well ahead of all whose work is already in it (or, `cheap`, for
the sake of steps and saves that would wait for it) and would grow by more than a quarter of a budget. So what is small
waits for the pass that is running, and not for the next one too. Whoever then waited begins the next pass, which does
not end early; so does whoever was passed over although nobody that still waits is less ahead. If the early end was for
another tenant's sake, the next pass has half the budget: who awaited that answer will soon be back.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from app.runs.log import FAILED, Ready


@dataclass(frozen=True, slots=True)
class Shares:
    """What one plan leaves to the next. Losing it harms nobody for longer than a few passes.

    `ahead`: tokens that a tenant has had more than one who comes now. `first`: the tenant that begins the next pass.
    `halved`: that pass has half the budget.
    """

    ahead: Mapping[str, int] = field(default_factory=dict)
    first: str | None = None
    halved: bool = False


def fill_pass(
    groups: Sequence[tuple[str, Sequence[Ready]]], *, budget: int, shares: Shares, cheap: Collection[str] = ()
) -> tuple[list[Ready], Shares]:
    """The operations of one pass, in the order of their turns, and the shares after it.

    `groups`: for each run its tenant and the operations that may go into the pass, runs in the order in which they
    should be served. `budget`: tokens. `cheap`: tenants whose steps or saves of the same cycle wait for the pass.
    """
    filling = _Filling(groups, budget, shares, cheap)
    filling.fill()
    return filling.operations, filling.shares()


def cost(operation: Ready) -> int:
    """Tokens that a pass spends on an operation; nothing on one that failed on arrival."""
    return 0 if operation.state == FAILED else operation.tokens


@dataclass(slots=True, eq=False)
class _Tenant:
    """A tenant in this pass. `start` and `ahead`: its lead before the pass and now. `waits`: something of it is left.
    `passed_over`: the run whose turn it was got nothing. `others`: its runs behind one whose operation did not fit.
    """

    owner_id: str
    order: int
    start: int
    ahead: int
    groups: deque[deque[Ready]] = field(default_factory=deque)
    others: deque[deque[Ready]] = field(default_factory=deque)
    tokens: int = 0
    waits: bool = False
    passed_over: bool = False

    @property
    def turn(self) -> tuple[int, int, int]:
        """Least is next; of equals, the one with the smaller operation."""
        return self.ahead, cost(self.groups[0][0]), self.order


class _Filling:
    """A pass while it is filled."""

    def __init__(
        self, groups: Sequence[tuple[str, Sequence[Ready]]], budget: int, shares: Shares, cheap: Collection[str]
    ) -> None:
        self._budget = budget
        self._room = budget // 2 if shares.halved else budget
        self._cheap = cheap
        self._before = shares
        self._tenants: dict[str, _Tenant] = {}
        self._taken: list[tuple[_Tenant, Ready]] = []
        for owner_id, operations in groups:
            lead = shares.ahead.get(owner_id, 0)
            tenant = self._tenants.setdefault(owner_id, _Tenant(owner_id, len(self._tenants), lead, lead))
            tenant.groups.append(deque(operations))
            self._take_free(tenant, tenant.groups[-1])
            if not tenant.groups[-1]:
                tenant.groups.pop()
        self._tenants = {name: tenant for name, tenant in self._tenants.items() if tenant.groups}
        self._used = 0
        self._ceiling: int | None = None  # no lead may grow beyond it: somebody was passed over
        self._first = self._tenants.get(shares.first or "")
        self._end: tuple[int, int] | None = None  # operations and tokens in the pass where it may end early
        self._ended_early = False
        if cheap:
            self._mark_end()

    @property
    def operations(self) -> list[Ready]:
        """What the pass holds."""
        return [operation for _, operation in self._taken]

    def fill(self) -> None:
        """Give the turns."""
        waiting = [(tenant.turn, tenant) for tenant in self._tenants.values() if tenant is not self._first]
        heapq.heapify(waiting)
        tenant = self._first
        while tenant is not None or waiting:
            if tenant is None:
                _, tenant = heapq.heappop(waiting)
            self._serve(tenant)
            if tenant.groups:
                heapq.heappush(waiting, (tenant.turn, tenant))
            elif self._all_lead([one for _, one in waiting]):
                self._mark_end()
            tenant = None
        self._fill_alone()
        self._end_early()

    def shares(self) -> Shares:
        """The shares after this pass. What all that still wait have in common is forgotten beyond half a budget."""
        mine = list(self._tenants.values())
        still = [tenant for tenant in mine if tenant.waits]
        first = min(still, key=lambda tenant: (tenant.ahead, not tenant.passed_over, tenant.order), default=None)
        if first is not None and not (self._ended_early or first.passed_over):
            first = None
        forgotten = max((tenant.ahead for tenant in still or mine), default=0) - self._budget // 2
        if still:
            forgotten = min(forgotten, min(tenant.ahead for tenant in still))
        forgotten = max(0, forgotten)
        ahead = {**self._before.ahead, **{tenant.owner_id: tenant.ahead for tenant in mine}}
        kept = {owner_id: lead - forgotten for owner_id, lead in ahead.items() if lead > forgotten}
        served = {tenant.owner_id for tenant in mine if tenant.tokens}.union(self._cheap)
        halved = self._ended_early and not served <= {tenant.owner_id for tenant in still}
        return Shares(kept, first.owner_id if first else None, halved)

    def _fill_alone(self) -> None:
        """If only one tenant still waits, let its other runs have the room that its next operation does not fit in."""
        still = [tenant for tenant in self._tenants.values() if tenant.waits]
        if len(still) != 1:
            return
        (alone,) = still
        others = alone.others
        while others:
            alone.groups = deque([others.popleft()])
            while alone.groups:
                self._serve(alone)

    def _serve(self, tenant: _Tenant) -> None:
        """Take the tenant's next operation, or pass the tenant over for this time."""
        group = tenant.groups[0]
        spent = cost(group[0])
        reached = tenant.ahead + spent
        if self._used and (spent > self._room - self._used or reached > (self._ceiling or reached)):
            self._ceiling = min(self._ceiling or reached, reached)
            tenant.passed_over |= not tenant.tokens
            tenant.waits = True
            tenant.groups.popleft()
            tenant.others, tenant.groups = tenant.groups, deque()
            return
        self._taken.append((tenant, group.popleft()))
        self._spend(tenant, spent)
        self._take_free(tenant, group)
        if not group:
            tenant.groups.popleft()

    def _take_free(self, tenant: _Tenant, group: deque[Ready]) -> None:
        while group and not cost(group[0]):
            self._taken.append((tenant, group.popleft()))

    def _spend(self, tenant: _Tenant, spent: int) -> None:
        self._used += spent
        tenant.tokens += spent
        tenant.ahead += spent

    def _all_lead(self, waiting: Sequence[_Tenant]) -> bool:
        """Whether all that are left were ahead, by a quarter of a budget, of somebody whose work is in the pass."""
        served = [tenant.start for tenant in self._tenants.values() if tenant.tokens]
        if not served or not waiting:
            return False
        return min(tenant.start for tenant in waiting) - min(served) >= self._budget // 4

    def _mark_end(self) -> None:
        """The pass may end here; at the first such place, but steps and saves wait for a little work of others too."""
        moves = self._end is None or (not self._end[1] and self._used <= self._budget // 4)
        if self._first is None and moves:
            self._end = len(self._taken), self._used

    def _end_early(self) -> None:
        """Give back what the pass has grown by since the mark, if that is much."""
        if self._end is None or self._used - self._end[1] <= self._budget // 4:
            return
        length, _ = self._end
        for tenant, operation in self._taken[length:]:
            self._spend(tenant, -cost(operation))
            tenant.waits = True
        del self._taken[length:]
        self._ended_early = True
