"""However datums are ordered, cut into requests, mixed with other runs and grouped into passes: the same results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.wire.types import AdamParams, Datum, ForwardBackwardOutput
from tests.unit.workers.model import model_reference as reference
from workers.model.base import BaseModel
from workers.model.forward import Work, run_pass
from workers.model.lora import Adapter
from workers.model.optim import fresh_state, optimizer_step

BASE = BaseModel(reference.plain_model("qwen3-tied"), "qwen3-tied")
SEEDS = st.integers(0, 2**31)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
BUDGETS = st.sampled_from([1, 48, 100, 4096])


def close(a: object, b: object) -> None:
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), atol=1e-4, rtol=1e-4)


def computed(adapter: Adapter, requests: Sequence[Sequence[Datum]], budget: int, *, together: bool) -> list[np.ndarray]:
    """The logprobs of all datums, in order; gradients add up in the adapter."""
    works = [Work(adapter, data, "cross_entropy") for data in requests]
    found = []
    for group in [works] if together else [[work] for work in works]:
        for output in run_pass(BASE, group, micro_batch_tokens=budget):
            assert isinstance(output, ForwardBackwardOutput), output
            found += [each["logprobs"] for each in output.loss_fn_outputs]
    return found


@settings(max_examples=40, deadline=None)
@given(LENGTHS, SEEDS, st.data(), BUDGETS, st.booleans())
def test_any_chunking_equals_one_request(
    lengths: list[int], seed: int, draw: st.DataObject, budget: int, together: bool
) -> None:
    data = reference.random_data(seed, lengths)
    cuts = sorted(draw.draw(st.sets(st.integers(1, max(1, len(data) - 1)))) & set(range(1, len(data))))
    chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    one, many = reference.random_adapter(BASE, 3), reference.random_adapter(BASE, 3)
    whole = computed(one, [data], 4096, together=True)
    cut = computed(many, chunks, budget, together=together)
    assert len(whole) == len(cut)
    for a, b in zip(whole, cut, strict=True):
        close(a, b)
    close(one.grad_flat, many.grad_flat)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, SEEDS, st.data(), BUDGETS)
def test_any_order_of_datums_permutes_the_results(
    lengths: list[int], seed: int, draw: st.DataObject, budget: int
) -> None:
    data = reference.random_data(seed, lengths)
    order = draw.draw(st.permutations(range(len(data))))
    one, other = reference.random_adapter(BASE, 3), reference.random_adapter(BASE, 3)
    straight = computed(one, [data], 4096, together=True)
    permuted = computed(other, [[data[i] for i in order]], budget, together=True)
    for place, i in enumerate(order):
        close(straight[i], permuted[place])
    close(one.grad_flat, other.grad_flat)


class Run:
    """A script of forward_backwards and steps on a run of its own. `eps` is large: with a small one Adam makes a full
    step of what is rounding in a gradient near zero."""

    def __init__(self, seed: int, script: Sequence[int | None]) -> None:
        self.adapter = reference.random_adapter(BASE, seed, rank=1 + seed % 5)
        self.state = fresh_state("adamw", self.adapter)
        self.left = [None if n is None else reference.random_data(seed + i, [n, 7]) for i, n in enumerate(script)]
        self.losses: list[float] = []

    def step(self) -> None:
        optimizer_step([(self.adapter, self.state, AdamParams(learning_rate=1e-3, eps=0.1))])
        self.adapter.zero_grad()


def advance(runs: Sequence[Run]) -> None:
    """The next operation of each of these runs: all passes as one."""
    passes = [(run, data) for run in runs if (data := run.left.pop(0)) is not None or run.step()]
    works = [Work(run.adapter, data, "cross_entropy") for run, data in passes]
    for (run, _), output in zip(passes, run_pass(BASE, works, micro_batch_tokens=100), strict=True):
        assert isinstance(output, ForwardBackwardOutput)
        run.losses.append(output.metrics["loss:sum"])


SCRIPTS = st.lists(st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=6), min_size=2, max_size=4)


@settings(max_examples=25, deadline=None)
@given(SCRIPTS, SEEDS, st.data())
def test_any_interleaving_of_runs_equals_each_alone(
    scripts: list[list[int | None]], seed: int, draw: st.DataObject
) -> None:
    alone = [Run(seed % 1000 + i, script) for i, script in enumerate(scripts)]
    mixed = [Run(seed % 1000 + i, script) for i, script in enumerate(scripts)]
    for run in alone:
        while run.left:
            advance([run])
    while waiting := [run for run in mixed if run.left]:
        advance(draw.draw(st.lists(st.sampled_from(waiting), min_size=1, unique=True)))
    for a, b in zip(alone, mixed, strict=True):
        close(a.losses, b.losses)
        close(a.adapter.flat, b.adapter.flat)
        close(a.adapter.grad_flat, b.adapter.grad_flat)
