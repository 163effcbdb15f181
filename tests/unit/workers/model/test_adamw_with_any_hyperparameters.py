"""AdamW against `torch.optim.AdamW` in float64, which is another implementation of another precision."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from app.wire.types import AdamParams
from tests.unit.workers.model.optimizer_lab import make_run, set_grad
from workers.model.optim import optimizer_step

PARAMS = st.builds(
    AdamParams,
    learning_rate=st.floats(1e-5, 1e-1),
    beta1=st.floats(0, 0.99),
    beta2=st.floats(0.5, 0.9999),
    eps=st.sampled_from([1e-12, 1e-8, 1e-3]),
    weight_decay=st.sampled_from([0.0, 0.01, 0.5]),
    grad_clip_norm=st.sampled_from([0.0, 0.3, 5.0, 1e9]),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(0, 2**31), st.integers(-6, 4))
def test_each_run_follows_torch_in_float64(params: list[AdamParams], seed: int, magnitude: int) -> None:
    runs = [make_run("adamw", seed + i, each, rank=i + 1) for i, each in enumerate(params)]
    theirs = [nn.Parameter(run.adapter.flat.double()) for run in runs]
    optimizers = [
        torch.optim.AdamW([p], c.learning_rate, (c.beta1, c.beta2), c.eps, c.weight_decay)
        for p, c in zip(theirs, params, strict=True)
    ]
    for step in range(4):
        for i, run in enumerate(runs):
            set_grad(run.adapter, seed + 100 * step + i, 10.0**magnitude)
            theirs[i].grad = run.adapter.grad_flat.double()
        optimizer_step([run.item for run in runs])
        for their, optimizer, each in zip(theirs, optimizers, params, strict=True):
            if each.grad_clip_norm:
                nn.utils.clip_grad_norm_([their], each.grad_clip_norm)
            optimizer.step()
    for run, their, each in zip(runs, theirs, params, strict=True):
        moved = 4 * each.learning_rate
        torch.testing.assert_close(run.adapter.flat.double(), their.detach(), atol=1e-6 + 1e-4 * moved, rtol=1e-6)


def test_a_parameter_without_rows_has_gradient_zero_and_not_none() -> None:
    """Its moments decay, its momentum carries it on, and weight decay applies."""
    run = make_run("adamw", 1, AdamParams(learning_rate=1e-2, eps=1e-8, weight_decay=0.1))
    parameter = nn.Parameter(run.adapter.flat.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(3):
        set_grad(run.adapter, step)
        if step:
            run.adapter.factors["b"].grad_a.zero_()
            run.adapter.factors["b"].grad_b_t.zero_()
        parameter.grad = run.adapter.grad_flat.clone()
        before = run.adapter.factors["b"].a.clone()
        optimizer_step([run.item])
        optimizer.step()
        assert not torch.equal(run.adapter.factors["b"].a, before)
    assert torch.equal(run.adapter.flat, parameter.data)


def test_the_norm_of_an_update_is_how_far_the_weights_moved() -> None:
    run = make_run("adamw", 3, AdamParams(learning_rate=1e-2, weight_decay=0.5))
    set_grad(run.adapter, 4)
    before = run.adapter.flat.clone()
    (metrics,) = optimizer_step([run.item])
    assert isinstance(metrics, dict)
    assert metrics["update_norm"] == pytest.approx(float((run.adapter.flat - before).norm()), rel=1e-6)
