"""Every rank but the first: does what rank 0 says until it says stop, or is gone."""

from __future__ import annotations

from app.wire.types import LoraConfig
from workers.model.adapter import Adapter
from workers.model.base import BaseModel
from workers.model.forward import SavedGradients
from workers.model.ranks.group import RankGroup
from workers.model.ranks.messages import Message
from workers.model.ranks.passes import PASS, read_pass, results_message, run_share

HOLD = "hold"
"""A new adapter, by its number and configuration."""
WEIGHTS = "weights"
"""The weights of an adapter follow as a broadcast."""
DROP = "drop"
"""An adapter is not needed any more."""
CLEAR = "clear"
"""The gradients of these adapters count no more."""
SUM = "sum"
"""An adapter's gradient is summed into rank 0's."""
UNDO = "undo"
"""The last pass failed: gradients are what they were before it."""
PING = "ping"
"""Rank 0 has nothing to do, and is alive."""
STOP = "stop"
"""The end."""


class Follower:
    """What a rank holds: its part of the base model, a copy of each adapter, a gradient of its own for each."""

    def __init__(self, base: BaseModel, group: RankGroup) -> None:
        self._base = base
        self._group = group
        self._adapters: dict[int, Adapter] = {}
        self._before: SavedGradients | None = None

    def run(self) -> None:
        """Follow rank 0 until it says stop. Raises whatever goes wrong: a rank out of step is of no use."""
        while (message := self._group.hear()).kind != STOP:
            self._obey(message)

    def _obey(self, message: Message) -> None:
        number = message.fields.get("adapter", -1)
        if message.kind == PASS:
            self._run_pass(message)
        elif message.kind == HOLD:
            self._adapters[number] = self._base.new_adapter(LoraConfig(**message.fields["config"]))
        elif message.kind == WEIGHTS:
            self._group.spread(self._adapters[number].flat)
        elif message.kind == DROP:
            self._before = None
            del self._adapters[number]
        elif message.kind == CLEAR:
            for each in message.fields["adapters"]:
                self._adapters[each].zero_grad()
        elif message.kind == SUM:
            self._before = None
            self._group.sum_to_first(self._adapters[number].grad_flat)
            self._adapters[number].zero_grad()
        elif message.kind == UNDO:
            assert self._before is not None
            self._before.restore()
        else:
            assert message.kind == PING, message.kind

    def _run_pass(self, message: Message) -> None:
        mine = read_pass(message, self._adapters, self._group.rank)
        self._before = SavedGradients(mine.adapters if mine.backward else ())
        computed = run_share(self._base, mine.works, mine.batches, count=mine.count, backward=mine.backward)
        if mine.backward:
            for adapter in mine.adapters:
                adapter.has_grad = True
        self._group.reply(results_message(computed, mine.numbers))
