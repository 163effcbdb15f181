"""Steps of several runs at once against `torch.optim.AdamW` and `clip_grad_norm_` of each alone."""

import pytest
import torch
from torch import nn

from app.wire.types import AdamParams, LoraConfig
from workers.model.lora import Adapter
from workers.model.optim import AdamState, NonFiniteGradient, optimizer_step

SHAPES = {"a": (24, 16), "b": (8, 40)}
PARAMS = [
    AdamParams(),
    AdamParams(learning_rate=3e-3, beta1=0.8, beta2=0.99, eps=1e-8, weight_decay=0.1),
    AdamParams(learning_rate=1e-2, grad_clip_norm=0.5, eps=1e-8),
    AdamParams(learning_rate=1e-2, grad_clip_norm=1e6, weight_decay=0.01),
]


def make(seed: int, rank: int = 4) -> tuple[Adapter, AdamState]:
    adapter = Adapter(LoraConfig(rank=rank, seed=seed), SHAPES)
    adapter.flat.normal_(generator=torch.Generator().manual_seed(seed))
    return adapter, AdamState.zeros(adapter)


def set_grad(adapter: Adapter, seed: int) -> None:
    adapter.zero_grad()
    adapter.add_grad(torch.randn(adapter.num_parameters, generator=torch.Generator().manual_seed(seed)))


def test_steps_equal_torch_bit_for_bit() -> None:
    runs = [make(i, rank=i + 1) for i in range(len(PARAMS))]
    theirs = [nn.Parameter(adapter.flat.clone()) for adapter, _ in runs]
    optimizers = [
        torch.optim.AdamW([p], lr=c.learning_rate, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=c.weight_decay)
        for p, c in zip(theirs, PARAMS, strict=True)
    ]
    for step in range(6):
        active = [i for i in range(len(runs)) if (step + i) % 3]
        before = {i: runs[i][0].flat.clone() for i in active}
        for i in active:
            set_grad(runs[i][0], 100 * step + i)
            theirs[i].grad = runs[i][0].grad_flat.clone()
        metrics = optimizer_step([(*runs[i], PARAMS[i]) for i in active])
        for i, found in zip(active, metrics, strict=True):
            norm = float(theirs[i].grad.norm())  # type: ignore[union-attr]
            if PARAMS[i].grad_clip_norm:
                nn.utils.clip_grad_norm_([theirs[i]], PARAMS[i].grad_clip_norm)
            optimizers[i].step()
            adapter, state = runs[i]
            exact = PARAMS[i].grad_clip_norm == 0
            torch.testing.assert_close(
                adapter.flat, theirs[i].data, atol=0 if exact else 1e-6, rtol=0 if exact else 1e-6
            )
            assert isinstance(found, dict)
            assert found["grad_norm"] == pytest.approx(norm, rel=1e-5)
            assert found["update_norm"] == pytest.approx(float((adapter.flat - before[i]).norm()), rel=1e-5)
            assert found["weight_norm"] == pytest.approx(float(adapter.flat.norm()), rel=1e-5)
            assert found["learning_rate"] == PARAMS[i].learning_rate
            assert not adapter.grad_flat.any() and not adapter.has_grad
            assert state.step == optimizers[i].state[theirs[i]]["step"]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_gradient_is_refused_and_cleared_alone(poison: float) -> None:
    (sick, sick_state), (well, well_state), (alone, alone_state) = make(1), make(2), make(2)
    optimizer_step([(sick, sick_state, PARAMS[1])])
    for adapter, seed in ((sick, 1), (well, 2), (alone, 2)):
        set_grad(adapter, seed)
    sick.grad_flat[5] = poison
    before = [tensor.clone() for tensor in (sick.flat, sick_state.m, sick_state.v)]
    refused, stepped = optimizer_step([(sick, sick_state, PARAMS[1]), (well, well_state, PARAMS[2])])
    assert isinstance(refused, NonFiniteGradient)
    assert isinstance(stepped, dict)
    assert sick_state.step == 1 and not sick.grad_flat.any() and not sick.has_grad
    assert all(torch.equal(a, b) for a, b in zip((sick.flat, sick_state.m, sick_state.v), before, strict=True))
    optimizer_step([(alone, alone_state, PARAMS[2])])
    assert torch.equal(well.flat, alone.flat)


def test_large_but_finite_gradients_are_not_refused() -> None:
    adapter, state = make(1)
    adapter.grad_flat.fill_(1e25)
    (metrics,) = optimizer_step([(adapter, state, AdamParams(grad_clip_norm=1.0))])
    assert isinstance(metrics, dict)
    assert torch.isfinite(adapter.flat).all()
