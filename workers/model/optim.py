"""Optimizer steps of several runs at once, of whatever kinds (SEMANTICS §5)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from app.wire.types import AdamParams, DimuonParams
from workers.model.adamw import AdamState, adamw_update
from workers.model.adapter import Adapter
from workers.model.dimuon import DimuonState, dimuon_update
from workers.model.pieces import Norms, StepNorms, groups

OptimizerState = AdamState | DimuonState
OptimizerParams = AdamParams | DimuonParams


class NonFiniteGradient(ValueError):
    """The step was refused: the gradient holds NaN or infinity. It is cleared, all else is as it was."""

    def __init__(self) -> None:
        super().__init__("the gradient is not finite; it was cleared and no step was taken")


def fresh_state(kind: str, adapter: Adapter) -> OptimizerState:
    """The state of the optimizer `kind` before the first step. Raises ValueError if there is no such kind."""
    if kind == AdamState.kind:
        return AdamState.zeros(adapter)
    if kind == DimuonState.kind:
        return DimuonState.zeros(adapter)
    raise ValueError(f"there is no optimizer {kind!r}")


@torch.no_grad()
def optimizer_step(
    items: Sequence[tuple[Adapter, OptimizerState, OptimizerParams]],
) -> list[dict[str, float] | NonFiniteGradient]:
    """One step of each run, each with its own optimizer, hyperparameters and step count; consumes and clears the
    gradients. The parameters are of the kind of the state.

    AdamW's arithmetic is that of `torch.optim.AdamW`, clipping that of `clip_grad_norm_` over the whole adapter.
    Returns the metrics of SEMANTICS §5 (`grad_norm` is from before clipping), or `NonFiniteGradient` for a run that was
    refused.
    """
    if not items:
        return []
    grad_norms = _grad_norms([adapter for adapter, _, _ in items])
    finite = [i for i, norm in enumerate(grad_norms) if math.isfinite(norm)]
    _clip([(items[i][0], items[i][2], grad_norms[i]) for i in finite])
    adams, dimuons = [], []
    for i in finite:
        adapter, state, params = items[i]
        if isinstance(state, AdamState):
            assert isinstance(params, AdamParams)
            adams.append((i, adapter, state, params))
        else:
            assert isinstance(params, DimuonParams)
            dimuons.append((i, adapter, state, params))
    norms = StepNorms()
    if adams:
        adamw_update(adams, norms)
    if dimuons:
        dimuon_update(dimuons, norms)
    _clear([adapter for adapter, _, _ in items])
    outcomes: list[dict[str, float] | NonFiniteGradient] = [NonFiniteGradient() for _ in items]
    for i, (weight_norm, update_norm) in norms.read().items():
        outcomes[i] = {
            "grad_norm": grad_norms[i],
            "update_norm": update_norm,
            "weight_norm": weight_norm,
            "learning_rate": items[i][2].learning_rate,
        }
    return outcomes


def _grad_norms(adapters: Sequence[Adapter]) -> list[float]:
    norms = Norms()
    for owners, (grads,) in groups([(adapter.grad_flat,) for adapter in adapters]):
        norms.add(owners, grads)
    found = norms.read()
    return [found[i] for i in range(len(adapters))]


def _clip(runs: Sequence[tuple[Adapter, OptimizerParams, float]]) -> None:
    """Scale the gradients of those runs that ask for it and are over their limit."""
    factors = [
        (adapter.grad_flat, params.grad_clip_norm / (grad_norm + 1e-6))
        for adapter, params, grad_norm in runs
        if params.grad_clip_norm > 0
    ]
    over = [(grad, factor) for grad, factor in factors if factor < 1]
    if over:
        torch._foreach_mul_([grad for grad, _ in over], [factor for _, factor in over])


def _clear(adapters: Sequence[Adapter]) -> None:
    torch._foreach_zero_([adapter.grad_flat for adapter in adapters])
    for adapter in adapters:
        adapter.has_grad = False
