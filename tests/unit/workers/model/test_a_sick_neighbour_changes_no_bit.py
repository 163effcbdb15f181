"""What one tenant sends changes no bit of what another gets: compared with a healthy neighbour of the same shapes.

A request that is refused takes no part in a pass, so there the comparison is with a neighbour that sent nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from app.errors import InvalidRequest
from app.wire.types import AdamParams, Datum, ForwardBackwardOutput
from tests.unit.workers.model import model_reference as reference
from workers.model.base import BaseModel
from workers.model.forward import Work, run_pass
from workers.model.optim import NonFiniteGradient, fresh_state, optimizer_step

LENGTHS = [9, 17, 4, 30]
LOSS = "importance_sampling"
Damage = Callable[[list[Datum]], None]


def data_of(seed: int) -> list[Datum]:
    """Datums for importance sampling."""
    draw = np.random.default_rng(seed)
    made = []
    for datum in reference.random_data(seed, LENGTHS):
        n = len(datum.tokens)
        logprobs, advantages = -draw.random(n).astype(np.float32), draw.normal(size=n).astype(np.float32)
        inputs = {"target_tokens": datum.inputs["target_tokens"], "logprobs": logprobs, "advantages": advantages}
        made.append(Datum(datum.tokens, inputs))
    return made


def healthy(data: list[Datum]) -> None:
    """Nothing is wrong."""


def token_out_of_the_vocabulary(data: list[Datum]) -> None:
    data[1].tokens[3] = 10**6


def nan_advantages(data: list[Datum]) -> None:
    data[2].inputs["advantages"][:] = np.nan


def infinite_logprobs(data: list[Datum]) -> None:
    data[0].inputs["logprobs"][1] = -np.inf


def huge_advantages(data: list[Datum]) -> None:
    data[3].inputs["advantages"][:] = 1e38


class Seen(NamedTuple):
    """What the victim has after three steps, and what the neighbour got for its passes."""

    logprobs: list[np.ndarray]
    loss: list[float]
    weights: Tensor
    moments: dict[str, Tensor]
    neighbour: list[object]


def played(qwen: BaseModel, damage: Damage | None, learning_rate: float, budget: int) -> Seen:
    """Three steps of the victim beside a neighbour that sends damaged data, or nothing (None), or steps too far."""
    victim, neighbour = reference.random_adapter(qwen, 1), reference.random_adapter(qwen, 2, rank=7)
    states = fresh_state("adamw", victim), fresh_state("adamw", neighbour)
    logprobs: list[np.ndarray] = []
    loss: list[float] = []
    met: list[object] = []
    for step in range(3):
        works = [Work(victim, data_of(step), LOSS)]
        if damage is not None:
            theirs = data_of(50 + step)
            damage(theirs)
            works.insert(0, Work(neighbour, theirs, LOSS))
        *others, mine = run_pass(qwen, works, micro_batch_tokens=budget)
        assert isinstance(mine, ForwardBackwardOutput)
        logprobs += [each["logprobs"] for each in mine.loss_fn_outputs]
        loss.append(mine.metrics["loss:sum"])
        met += others
        params = AdamParams(learning_rate=learning_rate), AdamParams(learning_rate=1e-3)
        stepped, _ = optimizer_step([(neighbour, states[1], params[0]), (victim, states[0], params[1])])
        met.append(stepped)
        for adapter in (victim, neighbour):
            adapter.zero_grad()
    return Seen(logprobs, loss, victim.flat.clone(), states[0].tensors(), met)


@pytest.mark.parametrize("budget", [40, 4096])
@pytest.mark.parametrize(
    ("damage", "learning_rate"),
    [
        (nan_advantages, 1e-3),
        (infinite_logprobs, 1e-3),
        (huge_advantages, 1e-3),
        (healthy, 1e6),
        (nan_advantages, 1e6),
    ],
)
def test_the_victim_has_the_same_bits(qwen: BaseModel, damage: Damage, learning_rate: float, budget: int) -> None:
    check_same_bits(played(qwen, healthy, 1e-3, budget), played(qwen, damage, learning_rate, budget))


@pytest.mark.parametrize("budget", [40, 4096])
def test_a_request_that_is_refused_might_as_well_not_have_been_sent(qwen: BaseModel, budget: int) -> None:
    check_same_bits(played(qwen, None, 1e-3, budget), played(qwen, token_out_of_the_vocabulary, 1e-3, budget))


def check_same_bits(well: Seen, sick: Seen) -> None:
    """Of everything that the victim has."""
    assert all(np.array_equal(a, b) for a, b in zip(well.logprobs, sick.logprobs, strict=True))
    assert well.loss == sick.loss
    assert torch.equal(well.weights, sick.weights)
    assert well.moments.keys() == sick.moments.keys()
    assert all(torch.equal(tensor, sick.moments[name]) for name, tensor in well.moments.items())


def test_the_neighbour_does_suffer(qwen: BaseModel) -> None:
    refused = played(qwen, token_out_of_the_vocabulary, 1e-3, 4096).neighbour
    assert isinstance(refused[0], InvalidRequest) and "data[1].model_input: token 1000000" in str(refused[0])
    stepped = played(qwen, nan_advantages, 1e-3, 4096).neighbour
    assert any(isinstance(each, InvalidRequest | NonFiniteGradient) for each in stepped)
    far = played(qwen, healthy, 1e6, 4096).neighbour
    near = played(qwen, healthy, 1e-3, 4096).neighbour
    assert far[2].metrics["loss:sum"] != near[2].metrics["loss:sum"]  # type: ignore[attr-defined]
