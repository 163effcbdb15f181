"""An engine whose arithmetic a test can follow: every operation leaves a mark that depends on all before it.

A run's state is two whole numbers in its real tensors: `value`, its first weight, and `grad`, the first of its
gradient. A `forward_backward` adds its datum's first token to `grad`, a step makes `value` of both. Results tell them,
so that an operation that is lost, repeated or out of its order shows in every result after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.wire.types import ForwardBackwardOutput
from workers.model.adapter import Adapter
from workers.model.base import BaseModel
from workers.model.engine import StepItem, StepOutcome
from workers.model.forward import Outcome, Work

PRIME = 8191
"""Numbers below it, and what becomes of them, are exact in float32."""


@dataclass
class Expected:
    """The same arithmetic on its own. `summed` and `failed`: operations since the last step."""

    value: int = 0
    grad: int = 0
    summed: int = 0
    failed: int = 0

    def add(self, number: int) -> float:
        """A `forward_backward`; returns what its result tells."""
        self.grad, self.summed = (self.grad + number) % PRIME, self.summed + 1
        return mark(self.value, self.grad)

    def step(self) -> float:
        """An `optim_step`, of a gradient; returns what its result tells."""
        self.value = stepped(self.value, self.grad)
        self.clear()
        return float(self.value)

    def clear(self) -> None:
        self.grad = self.summed = self.failed = 0


def stepped(value: int, grad: int) -> int:
    return (3 * value + grad + 1) % PRIME


def mark(value: int, grad: int) -> float:
    return float(value * 1000 + grad % 1000)


class CountingEngine:
    """Counts on the adapters of `base`, without a pass."""

    def __init__(self, base: BaseModel) -> None:
        self.base = base

    def run_pass(self, works: Sequence[Work]) -> list[Outcome]:
        return [self._count(work) for work in works]

    def _count(self, work: Work) -> ForwardBackwardOutput:
        value, grad = _numbers(work.adapter)
        grad = (grad + int(work.data[0].tokens[0])) % PRIME
        _set(work.adapter, value, grad)
        work.adapter.has_grad = True
        return ForwardBackwardOutput(
            [{"logprobs": np.zeros(len(datum.tokens), np.float32)} for datum in work.data],
            {"loss:sum": mark(value, grad)},
        )

    def optimizer_step(self, items: Sequence[StepItem]) -> list[StepOutcome]:
        outcomes: list[StepOutcome] = []
        for adapter, state, _ in items:
            value = stepped(*_numbers(adapter))
            adapter.zero_grad()
            _set(adapter, value, 0)
            adapter.has_grad = False
            state.step += 1
            outcomes.append({"value": float(value)})
        return outcomes

    def collect_gradients(self, adapters: Sequence[Adapter]) -> None: ...

    def idle(self) -> None: ...

    def close(self) -> None: ...


def _numbers(adapter: Adapter) -> tuple[int, int]:
    """A fresh adapter's first weight is a fraction: it stands for 0."""
    first = float(adapter.flat[0])
    return (int(first) if first.is_integer() else 0), int(adapter.grad_flat[0])


def _set(adapter: Adapter, value: int, grad: int) -> None:
    adapter.flat[0] = value
    adapter.grad_flat[0] = grad
