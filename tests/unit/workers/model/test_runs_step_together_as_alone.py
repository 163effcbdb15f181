"""Runs of both optimizers in one call: the bits of each are those that it has in a call of its own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.wire.types import AdamParams, DimuonParams
from tests.unit.workers.model.optimizer_lab import Run, make_run, same_bits, set_grad
from workers.model import pieces
from workers.model.optim import NonFiniteGradient, fresh_state, optimizer_step

ADAM = st.builds(
    AdamParams,
    learning_rate=st.floats(0, 0.1),
    beta1=st.floats(0, 0.99),
    weight_decay=st.sampled_from([0.0, 0.1]),
    grad_clip_norm=st.sampled_from([0.0, 0.5]),
)
DIMUON = st.builds(DimuonParams, learning_rate=st.floats(0, 0.1), beta1=st.floats(0, 0.99))
MEMBER = st.tuples(ADAM | DIMUON, st.integers(1, 9), st.booleans())


def make(index: int, params: AdamParams | DimuonParams, rank: int) -> Run:
    return make_run("adamw" if isinstance(params, AdamParams) else "dimuon", index, params, rank=rank)


@settings(max_examples=40, deadline=None)
@given(st.lists(MEMBER, min_size=2, max_size=6), st.integers(0, 2**31), st.sampled_from([64, 192, 1024, 1 << 16]))
def test_company_changes_no_bit(
    members: list[tuple[AdamParams | DimuonParams, int, bool]], seed: int, group: int
) -> None:
    together = [make(i, params, rank) for i, (params, rank, _) in enumerate(members)]
    alone = [make(i, params, rank) for i, (params, rank, _) in enumerate(members)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "CPU_SIZES", pieces.Sizes(piece=320, group=group))
        for step in range(3):
            for i, (_, _, sick) in enumerate(members):
                for run in (together[i], alone[i]):
                    set_grad(run.adapter, seed + 10 * step + i)
                    if sick and step == 1:
                        run.adapter.grad_flat[i] = float("nan")
            outcomes = optimizer_step([run.item for run in together])
            for i, run in enumerate(alone):
                (outcome,) = optimizer_step([run.item])
                assert same_bits(run, together[i])
                assert isinstance(outcome, NonFiniteGradient) == isinstance(outcomes[i], NonFiniteGradient)
                assert isinstance(outcome, NonFiniteGradient) or outcome == outcomes[i]
                assert isinstance(outcome, NonFiniteGradient) == (members[i][2] and step == 1)


@pytest.mark.parametrize("kind", ["adamw", "dimuon"])
def test_a_refused_step_leaves_all_but_the_gradient(kind: str) -> None:
    run = make_run(kind, 1)
    set_grad(run.adapter, 1)
    optimizer_step([run.item])
    before, step = run.bits, run.state.step
    set_grad(run.adapter, 2)
    run.adapter.grad_flat[-1] = float("inf")
    (outcome,) = optimizer_step([run.item])
    assert isinstance(outcome, NonFiniteGradient)
    assert all(torch.equal(a, b) for a, b in zip(run.bits, before, strict=True)) and run.state.step == step


def test_where_a_buffer_is_cut_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = (make_run("adamw", 1, AdamParams(weight_decay=0.1), rank=5) for _ in range(2))
    for step in range(2):
        for run, sizes in ((whole, pieces.Sizes(1 << 20, 1 << 20)), (cut, pieces.Sizes(128, 256))):
            monkeypatch.setattr(pieces, "CPU_SIZES", sizes)
            set_grad(run.adapter, step)
            optimizer_step([run.item])
    assert same_bits(whole, cut)


def test_an_optimizer_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="sgd"):
        fresh_state("sgd", make_run("adamw", 1).adapter)


def test_no_runs_are_no_step() -> None:
    assert optimizer_step([]) == []
