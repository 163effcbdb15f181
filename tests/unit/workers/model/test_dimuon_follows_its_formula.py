"""Dimuon against singular value decompositions in float64."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.wire.types import DimuonParams, LoraConfig
from tests.unit.workers.model.optimizer_lab import make_run, set_grad
from workers.model.adapter import Adapter
from workers.model.dimuon import msign
from workers.model.optim import NonFiniteGradient, fresh_state, optimizer_step


def msign_by_svd(m_RC: Tensor) -> Tensor:
    u, s, vh = torch.linalg.svd(m_RC.double(), full_matrices=False)
    kept = (s > 1e-7 * s[0]).double()
    return u @ torch.diag(kept) @ vh


def random_matrix(seed: int, rows: int, columns: int, rank: int | None = None, spread: float = 0.0) -> Tensor:
    """Float64, of the given rank, its singular values over `spread` decades."""
    draw = torch.Generator().manual_seed(seed)
    m = torch.randn(rows, columns, dtype=torch.float64, generator=draw)
    u, _, vh = torch.linalg.svd(m, full_matrices=False)
    rank = min(rows, columns) if rank is None else min(rank, rows, columns)
    s = torch.logspace(0, -spread, rank, dtype=torch.float64)
    return u[:, :rank] @ torch.diag(s) @ vh[:rank]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(1, 12),
    st.integers(1, 70),
    st.integers(1, 12),
    st.floats(0, 4),
    st.floats(-30, 30),
)
def test_msign_is_the_orthogonal_factor(
    seed: int, rows: int, columns: int, rank: int, spread: float, magnitude: float
) -> None:
    m = random_matrix(seed, rows, columns, rank, spread) * 10.0**magnitude
    found = msign(m[None])[0]
    torch.testing.assert_close(found, msign_by_svd(m), atol=1e-6, rtol=0)
    assert float(found.norm()) == pytest.approx(math.sqrt(min(rank, rows, columns)), rel=1e-9)


@pytest.mark.parametrize(("rows", "columns"), [(16, 1024), (64, 4096), (128, 500)])
def test_directions_that_are_rounding_noise_are_left_out(rows: int, columns: int) -> None:
    """Half the directions are null but for float64's rounding, which must not be taken for rank."""
    for seed in range(3):
        m = random_matrix(seed, rows, columns, rows // 2, 2.0)
        assert float(msign(m[None]).norm()) == pytest.approx(math.sqrt(rows // 2), rel=1e-9)


def test_every_direction_down_to_the_cutoff_has_length_one() -> None:
    m = random_matrix(3, 8, 200, spread=6.5)
    found = msign(m[None])[0]
    torch.testing.assert_close(
        torch.linalg.svdvals(found)[0], torch.tensor(1.0, dtype=torch.float64), atol=1e-2, rtol=0
    )
    assert float(found.norm()) == pytest.approx(math.sqrt(8), rel=1e-9)


def test_singular_values_count_from_1e_7_of_the_largest() -> None:
    m = torch.diag(torch.tensor([1.0, 1e-6, 1.1e-7, 0.9e-7, 1e-9, 0.0], dtype=torch.float64))
    torch.testing.assert_close(msign(m[None])[0], torch.diag(torch.tensor([1.0, 1, 1, 0, 0, 0], dtype=torch.float64)))


def test_matrices_of_one_batch_do_not_touch_each_other() -> None:
    batch = torch.stack([random_matrix(1, 6, 21), torch.zeros(6, 21), random_matrix(2, 6, 21, 3) * 1e-20])
    together = msign(batch)
    for alone, found in zip(batch, together, strict=True):
        assert torch.equal(msign(alone[None])[0], found)
    assert not together[1].any()


PARAMS = st.builds(
    DimuonParams,
    learning_rate=st.floats(0, 0.1),
    beta1=st.floats(0, 0.99),
    grad_clip_norm=st.sampled_from([-1.0, 0.0, 0.3, 5.0, 1e9]),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(PARAMS, min_size=1, max_size=3), st.integers(0, 2**31), st.integers(-6, 4))
def test_each_run_follows_the_formula_in_float64(params: list[DimuonParams], seed: int, magnitude: int) -> None:
    runs = [make_run("dimuon", seed + i, each, rank=i + 2) for i, each in enumerate(params)]
    weights = [{name: w.double() for name, w in run.adapter.state().items()} for run in runs]
    momenta = [{name: torch.zeros_like(w) for name, w in each.items()} for each in weights]
    for step in range(3):
        for i, (run, constant) in enumerate(zip(runs, params, strict=True)):
            run.params = each = dataclasses.replace(constant, beta1=constant.beta1 * (3 - step) / 3)
            set_grad(run.adapter, seed + 100 * step + i, 10.0**magnitude)
            norm = float(run.adapter.grad_flat.double().norm())
            clip = min(1.0, each.grad_clip_norm / norm) if each.grad_clip_norm > 0 else 1.0
            for path, pair in run.adapter.modules.items():
                for x, parameter in zip("AB", pair, strict=True):
                    assert parameter.grad is not None
                    name = f"{path}.lora_{x}"
                    m = momenta[i][name]
                    m.mul_(each.beta1).add_(parameter.grad.double() * clip, alpha=1 - each.beta1)
                    weights[i][name] -= each.learning_rate * msign_by_svd(m)
        optimizer_step([run.item for run in runs])
    for run, expected in zip(runs, weights, strict=True):
        for name, weight in run.adapter.state().items():
            torch.testing.assert_close(weight.double(), expected[name], atol=2e-5, rtol=1e-6)


def test_the_metrics_are_those_of_the_step() -> None:
    run = make_run("dimuon", 5, DimuonParams(learning_rate=0.01, grad_clip_norm=0.5), rank=3)
    set_grad(run.adapter, 6)
    norm = float(run.adapter.grad_flat.norm())
    before = run.adapter.flat.clone()
    (metrics,) = optimizer_step([run.item])
    assert isinstance(metrics, dict)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert metrics["update_norm"] == pytest.approx(0.01 * math.sqrt(6 * 3), rel=1e-4)
    assert metrics["update_norm"] == pytest.approx(float((run.adapter.flat - before).norm()), rel=1e-5)
    assert metrics["weight_norm"] == pytest.approx(float(run.adapter.flat.norm()), rel=1e-5)
    assert metrics["learning_rate"] == 0.01
    assert run.state.step == 1 and not run.adapter.grad_flat.any() and not run.adapter.has_grad


def test_a_matrix_that_never_had_a_gradient_stays() -> None:
    """As A does in the first step of a fresh adapter, whose B is zero."""
    run = make_run("dimuon", 1)
    set_grad(run.adapter, 2)
    for factors in run.adapter.factors.values():
        factors.grad_a.zero_()
    before = {path: (factors.a.clone(), factors.b_t.clone()) for path, factors in run.adapter.factors.items()}
    optimizer_step([run.item])
    for path, factors in run.adapter.factors.items():
        assert torch.equal(factors.a, before[path][0])
        assert not torch.equal(factors.b_t, before[path][1])


def test_each_expert_is_a_matrix_of_its_own() -> None:
    """A stack of three experts, to the second of which no token was routed."""
    adapter = Adapter(LoraConfig(rank=4, seed=1), {"experts": (3, 9, 14), "other": (9, 14)})
    factors = adapter.factors["experts"]
    factors.b_t.normal_(generator=torch.Generator().manual_seed(2))
    set_grad(adapter, 9)
    factors.grad_a[1].zero_()
    factors.grad_b_t[1].zero_()
    pairs = ((factors.a, factors.grad_a), (factors.b_t, factors.grad_b_t))
    before = [(weights.clone(), grads.clone()) for weights, grads in pairs]
    optimizer_step([(adapter, fresh_state("dimuon", adapter), DimuonParams(learning_rate=0.01))])
    for (found, _), (weights, grads) in zip(pairs, before, strict=True):
        assert torch.equal(found[1], weights[1])
        for expert in (0, 2):
            expected = weights[expert].double() - 0.01 * msign_by_svd(grads[expert])
            torch.testing.assert_close(found[expert].double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 3e38])
def test_gradients_at_the_end_of_the_range_stop_no_one(poison: float) -> None:
    """Not finite: refused. Finite: taken, though its squares are not."""
    run, other, alone = (make_run("dimuon", seed) for seed in (1, 2, 2))
    for each, seed in ((run, 1), (other, 2), (alone, 2)):
        set_grad(each.adapter, seed)
    run.adapter.grad_flat[::3] = poison
    outcome, stepped = optimizer_step([run.item, other.item])
    assert isinstance(outcome, NonFiniteGradient) == (not math.isfinite(poison))
    assert isinstance(stepped, dict) and torch.isfinite(run.adapter.flat).all()
    optimizer_step([alone.item])
    assert torch.equal(other.adapter.flat, alone.adapter.flat)
