"""Optimizers on adapters' flat buffers (SEMANTICS §5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.wire.types import AdamParams
from workers.model.lora import Adapter


class NonFiniteGradient(ValueError):
    """The step was refused: the gradient holds NaN or infinity. It is cleared, all else is as it was."""

    def __init__(self) -> None:
        super().__init__("the gradient is not finite; it was cleared and no step was taken")


@dataclass(slots=True, eq=False)
class AdamState:
    """AdamW's moments of one run, float32 [P] like its adapter's `flat`, and the number of steps taken."""

    m: Tensor
    v: Tensor
    step: int = 0

    @classmethod
    def zeros(cls, adapter: Adapter) -> AdamState:
        """The state before the first step."""
        return cls(torch.zeros_like(adapter.flat), torch.zeros_like(adapter.flat))


@torch.no_grad()
def adamw_step(
    items: Sequence[tuple[Adapter, AdamState, AdamParams]],
) -> list[dict[str, float] | NonFiniteGradient]:
    """One step of each run, each with its own hyperparameters and step count; consumes and clears the gradients.

    The arithmetic is that of `torch.optim.AdamW`, clipping that of `clip_grad_norm_` over the whole adapter. Returns
    the metrics of SEMANTICS §5 (`grad_norm` is from before clipping), or `NonFiniteGradient` for a run that was
    refused.
    """
    if not items:
        return []
    grad_norms = _to_host([_norm(adapter.grad_flat) for adapter, _, _ in items])
    norms: list[Tensor] = []
    for (adapter, state, params), grad_norm in zip(items, grad_norms, strict=True):
        if math.isfinite(grad_norm):
            if params.grad_clip_norm > 0:
                adapter.grad_flat.mul_(min(1.0, params.grad_clip_norm / (grad_norm + 1e-6)))
            before = adapter.flat.clone()
            _adamw(adapter.flat, adapter.grad_flat, state, params)
            norms += [_norm(torch.sub(adapter.flat, before, out=before)), _norm(adapter.flat)]
        adapter.zero_grad()
    measured = iter(_to_host(norms))
    return [
        {
            "grad_norm": grad_norm,
            "update_norm": next(measured),
            "weight_norm": next(measured),
            "learning_rate": params.learning_rate,
        }
        if math.isfinite(grad_norm)
        else NonFiniteGradient()
        for (_, _, params), grad_norm in zip(items, grad_norms, strict=True)
    ]


def _adamw(weights: Tensor, grad: Tensor, state: AdamState, params: AdamParams) -> None:
    """In the order of operations of torch's single-tensor AdamW, so that a run alone in torch gives the same bits."""
    state.step += 1
    if params.weight_decay:
        weights.mul_(1 - params.learning_rate * params.weight_decay)
    state.m.lerp_(grad, 1 - params.beta1)
    state.v.mul_(params.beta2).addcmul_(grad, grad, value=1 - params.beta2)
    correction1 = 1 - params.beta1**state.step
    correction2 = 1 - params.beta2**state.step
    denominator = state.v.sqrt().div_(correction2**0.5).add_(params.eps)
    weights.addcdiv_(state.m, denominator, value=-params.learning_rate / correction1)


def _norm(x: Tensor) -> Tensor:
    """L2 norm in float64: finite exactly if all of `x` is."""
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def _to_host(scalars: Sequence[Tensor]) -> list[float]:
    return torch.stack(list(scalars)).tolist() if scalars else []
