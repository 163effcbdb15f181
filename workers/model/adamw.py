"""AdamW of several runs at once, each with its own hyperparameters and step count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from app.wire.types import AdamParams
from workers.model.adapter import Adapter
from workers.model.pieces import StepNorms, groups


@dataclass(slots=True, eq=False)
class AdamState:
    """AdamW's moments of one run, float32 [P] like its adapter's `flat`, and the number of steps taken."""

    kind: ClassVar[str] = "adamw"

    m: Tensor
    v: Tensor
    step: int = 0

    @classmethod
    def zeros(cls, adapter: Adapter) -> AdamState:
        """The state before the first step."""
        return cls(torch.zeros_like(adapter.flat), torch.zeros_like(adapter.flat))

    def tensors(self) -> dict[str, Tensor]:
        """All of the state but the number of steps, as a snapshot keeps it: the tensors themselves."""
        return {"m": self.m, "v": self.v}


class _Scalars(NamedTuple):
    """What a step multiplies a run's tensors with."""

    kept: float
    """1 − lr·weight_decay."""
    beta1_rest: float
    """1 − β₁."""
    beta2: float
    beta2_rest: float
    """1 − β₂."""
    root_correction2: float
    """√(1 − β₂ᵗ)."""
    eps: float
    rate: float
    """−lr / (1 − β₁ᵗ)."""


def _scalars(params: AdamParams, step: int) -> _Scalars:
    return _Scalars(
        1 - params.learning_rate * params.weight_decay,
        1 - params.beta1,
        params.beta2,
        1 - params.beta2,
        (1 - params.beta2**step) ** 0.5,
        params.eps,
        -params.learning_rate / (1 - params.beta1**step),
    )


def adamw_update(runs: Sequence[tuple[int, Adapter, AdamState, AdamParams]], norms: StepNorms) -> None:
    """Move each run's weights by its gradient, which is finite and clipped. The gradient's buffer is used up.

    The first of a run's four is what its norms are filed under.
    """
    scalars = []
    for _, _, state, params in runs:
        state.step += 1
        scalars.append(_scalars(params, state.step))
    buffers = [(adapter.flat, adapter.grad_flat, state.m, state.v) for _, adapter, state, _ in runs]
    for owners, (weights, grads, m, v) in groups(buffers):
        _update(weights, grads, m, v, [scalars[owner] for owner in owners])
        norms.add([runs[owner][0] for owner in owners], weights, grads)


def _update(
    weights: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor], scalars: Sequence[_Scalars]
) -> None:
    """In the order of operations of torch's single-tensor AdamW, so that a run alone in torch gives the same bits.

    The buffers of the gradients keep the weights of before.
    """
    kept, beta1_rest, beta2, beta2_rest, root_correction2, eps, rate = map(list, zip(*scalars, strict=True))
    torch._foreach_lerp_(m, grads, beta1_rest)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, grads, grads, beta2_rest)
    denominators = torch._foreach_sqrt(v)
    torch._foreach_div_(denominators, root_correction2)
    torch._foreach_add_(denominators, eps)
    torch._foreach_copy_(grads, weights)
    if any(factor != 1 for factor in kept):
        torch._foreach_mul_(weights, kept)
    torch._foreach_addcdiv_(weights, m, denominators, rate)
