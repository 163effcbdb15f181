"""What a train worker computes with: one process with the whole base model, or several ranks that share it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from workers.model.adapter import Adapter
from workers.model.base import BaseModel
from workers.model.forward import Outcome, Work, run_pass
from workers.model.optim import NonFiniteGradient, OptimizerParams, OptimizerState, optimizer_step

StepItem = tuple[Adapter, OptimizerState, OptimizerParams]
StepOutcome = dict[str, float] | NonFiniteGradient


class Engine(Protocol):
    """Passes and steps over adapters that live in the calling process. Used by one thread."""

    @property
    def base(self) -> BaseModel:
        """The base model, or this process's part of it."""

    def run_pass(self, works: Sequence[Work]) -> list[Outcome]:
        """See `workers.model.forward.run_pass`. Some of the gradient may stay where it was computed."""

    def optimizer_step(self, items: Sequence[StepItem]) -> list[StepOutcome]:
        """See `workers.model.optim.optimizer_step`."""

    def collect_gradients(self, adapters: Sequence[Adapter]) -> None:
        """Bring all of the adapters' gradients into their `grad_flat`."""

    def idle(self) -> None:
        """Called every second or so while there is nothing to do."""

    def close(self) -> None:
        """Nothing more will be asked."""


class SoloEngine:
    """One process that has all of the base model. `micro_batch_tokens`: see `run_pass`."""

    def __init__(self, base: BaseModel, *, micro_batch_tokens: int) -> None:
        self._base = base
        self._micro_batch_tokens = micro_batch_tokens

    @property
    def base(self) -> BaseModel:
        """The base model."""
        return self._base

    def run_pass(self, works: Sequence[Work]) -> list[Outcome]:
        """The pass, here."""
        return run_pass(self._base, works, micro_batch_tokens=self._micro_batch_tokens)

    def optimizer_step(self, items: Sequence[StepItem]) -> list[StepOutcome]:
        """The step, here."""
        return optimizer_step(items)

    def collect_gradients(self, adapters: Sequence[Adapter]) -> None:
        """They are here."""

    def idle(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to end."""
