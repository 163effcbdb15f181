"""Rank 0: an engine whose passes are computed by all ranks."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from weakref import WeakKeyDictionary

import structlog

from workers.metrics import count_micro_batches
from workers.model.adapter import Adapter
from workers.model.base import BaseModel
from workers.model.batch import Row
from workers.model.engine import StepItem, StepOutcome
from workers.model.forward import Outcome, SavedGradients, Work, output, refusal
from workers.model.optim import optimizer_step
from workers.model.ranks import follower
from workers.model.ranks.group import RankGroup
from workers.model.ranks.messages import Message
from workers.model.ranks.passes import Computed, add_results, batch_count, pass_message, run_share
from workers.model.ranks.shares import share_out

logger = structlog.get_logger(__name__)

PING_EVERY_S = 60.0


class ShardedEngine:
    """The engine of a worker of several ranks.

    The ranks hear of an adapter, of its new weights and of its end when the next pass needs it: `_stale` are adapters
    whose weights they lack, `_spread` those of whose gradient they may have a part. A gradient that was cleared here
    (`has_grad` is false) is cleared there before the next pass. What the ranks do in step must not end halfway:
    `on_lost` is called with the error if it does, and does not return in a worker, whose runs go to another then.
    """

    def __init__(
        self,
        base: BaseModel,
        group: RankGroup,
        *,
        micro_batch_tokens: int,
        on_lost: Callable[[object], None],
        before_end: Callable[[], None],
        after_end: Callable[[], None],
    ) -> None:
        self._base = base
        self._group = group
        self._micro_batch_tokens = micro_batch_tokens
        self._on_lost = on_lost
        self._before_end, self._after_end = before_end, after_end
        self._numbers: WeakKeyDictionary[Adapter, int] = WeakKeyDictionary()
        self._next = count()
        self._stale: set[int] = set()
        self._spread: set[int] = set()
        self._gone: list[int] = []
        self._told_at = time.monotonic()

    @property
    def base(self) -> BaseModel:
        """This rank's part of the base model."""
        return self._base

    def run_pass(self, works: Sequence[Work]) -> list[Outcome]:
        """As `workers.model.forward.run_pass`. Works that fail are left out, and the others are computed once more."""
        outcomes: list[Outcome | None] = [refusal(self._base, work) for work in works]
        for backward in (False, True):
            group = [i for i, work in enumerate(works) if work.backward == backward and outcomes[i] is None]
            while group:
                found = self._run_together([works[i] for i in group], backward)
                for i, outcome in zip(group, found, strict=True):
                    outcomes[i] = outcome
                group = [i for i in group if outcomes[i] is None]
        return [outcome for outcome in outcomes if outcome is not None]

    def _run_together(self, works: Sequence[Work], backward: bool) -> Sequence[Outcome | None]:
        """The outcomes if all works succeed, else those of the works that failed, and nothing has happened."""
        rows = [Row(i, n, work.adapter, datum) for i, work in enumerate(works) for n, datum in enumerate(work.data)]
        with self._in_step():
            computed = self._compute(works, rows, backward)
            if computed.errors:
                return [computed.errors.get(i) for i in range(len(works))]
        if backward:
            for work in works:
                work.adapter.has_grad = True
        return [output(work, computed.results[i]) for i, work in enumerate(works)]

    def _compute(self, works: Sequence[Work], rows: Sequence[Row], backward: bool) -> Computed:
        self._prepare([work.adapter for work in works])
        owners = [self._numbers[row.adapter] for row in rows]
        lengths = [len(row.datum.tokens) for row in rows]
        shares = share_out(lengths, owners, self._micro_batch_tokens, self._group.world, padded=self._base.pads)
        count_micro_batches([batch for share in shares for batch in share], lengths, padded=self._base.pads)
        before = SavedGradients(work.adapter for work in works if backward)
        self._tell(pass_message(works, self._numbers, rows, shares, backward=backward))
        mine = [[rows[i] for i in batch] for batch in shares[0]]
        computed = run_share(self._base, works, mine, count=batch_count(shares), backward=backward)
        for rank in range(1, self._group.world):
            add_results(self._group.reply_of(rank), rows, computed, self._base.device)
        if computed.errors:
            before.restore()
            self._tell(Message(follower.UNDO))
        elif backward:
            self._spread.update(owners)
        return computed

    def _prepare(self, adapters: Sequence[Adapter]) -> None:
        """Bring the other ranks' copies of `adapters`, and what they hold at all, up to date."""
        while self._gone:
            self._forget(self._gone.pop())
        self._clear_gradients()
        for adapter in adapters:
            if adapter not in self._numbers:
                number = next(self._next)
                self._numbers[adapter] = number
                weakref.finalize(adapter, self._gone.append, number).atexit = False
                self._stale.add(number)
                self._tell(Message(follower.HOLD, {"adapter": number, "config": asdict(adapter.config)}))
            if (number := self._numbers[adapter]) in self._stale:
                self._tell(Message(follower.WEIGHTS, {"adapter": number}))
                self._group.spread(adapter.flat)
                self._stale.discard(number)

    def _clear_gradients(self) -> None:
        cleared = [n for a, n in self._numbers.items() if n in self._spread and not a.has_grad]
        if cleared:
            self._tell(Message(follower.CLEAR, {"adapters": cleared}))
            self._spread.difference_update(cleared)

    def _forget(self, number: int) -> None:
        self._tell(Message(follower.DROP, {"adapter": number}))
        self._stale.discard(number)
        self._spread.discard(number)

    def optimizer_step(self, items: Sequence[StepItem]) -> list[StepOutcome]:
        """The step is taken here; the others hear of the weights before the next pass."""
        adapters = [adapter for adapter, _, _ in items]
        self.collect_gradients(adapters)
        outcomes = optimizer_step(items)
        self._stale.update(self._numbers[adapter] for adapter in adapters if adapter in self._numbers)
        return outcomes

    def collect_gradients(self, adapters: Sequence[Adapter]) -> None:
        """Sum the gradients of all ranks into this one's."""
        with self._in_step():
            self._clear_gradients()
            for adapter in adapters:
                number = self._numbers.get(adapter)
                if number in self._spread:
                    self._tell(Message(follower.SUM, {"adapter": number}))
                    self._group.sum_to_first(adapter.grad_flat)
                    self._spread.discard(number)

    def idle(self) -> None:
        """Let the others know that this rank is alive."""
        if time.monotonic() - self._told_at > PING_EVERY_S:
            with self._in_step():
                self._tell(Message(follower.PING))

    def close(self) -> None:
        """End the other ranks."""
        self._before_end()
        with self._in_step():
            self._tell(Message(follower.STOP))
        self._group.close()
        self._after_end()

    def _tell(self, message: Message) -> None:
        self._group.tell(message)
        self._told_at = time.monotonic()

    @contextmanager
    def _in_step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            logger.error("ranks_lost", exc_info=error)
            self._on_lost(error)
            raise
