"""Runs with random weights, gradients and states, for tests of optimizers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from app.wire.types import AdamParams, DimuonParams, LoraConfig
from workers.model.adapter import Adapter
from workers.model.optim import OptimizerParams, OptimizerState, fresh_state

SHAPES = {"a": (24, 17), "b": (9, 40), "c": (24, 17)}


@dataclass
class Run:
    """One run and what it steps with."""

    adapter: Adapter
    state: OptimizerState
    params: OptimizerParams

    @property
    def item(self) -> tuple[Adapter, OptimizerState, OptimizerParams]:
        """As `optimizer_step` takes it."""
        return self.adapter, self.state, self.params

    @property
    def bits(self) -> list[Tensor]:
        """Copies of all that a step may change."""
        return [
            tensor.clone() for tensor in (self.adapter.flat, self.adapter.grad_flat, *self.state.tensors().values())
        ]


def make_run(kind: str, seed: int, params: OptimizerParams | None = None, *, rank: int = 4) -> Run:
    """A run of the given optimizer; the same for the same arguments."""
    adapter = Adapter(LoraConfig(rank=rank, seed=seed), SHAPES)
    adapter.flat.normal_(generator=torch.Generator().manual_seed(seed))
    default = AdamParams() if kind == "adamw" else DimuonParams(learning_rate=1e-3)
    return Run(adapter, fresh_state(kind, adapter), params or default)


def set_grad(adapter: Adapter, seed: int, size: float = 1.0) -> None:
    """A random gradient in place of what there was."""
    adapter.zero_grad()
    draw = torch.Generator().manual_seed(seed)
    adapter.add_grad(torch.randn(adapter.num_parameters, generator=draw) * size)


def same_bits(left: Run, right: Run) -> bool:
    """Whether two runs differ in nothing."""
    equal = all(torch.equal(a, b) for a, b in zip(left.bits, right.bits, strict=True))
    return equal and left.state.step == right.state.step
