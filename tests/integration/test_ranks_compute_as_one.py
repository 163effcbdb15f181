"""Two and four ranks give the log-probabilities, losses, gradients and steps that one process gives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from app.errors import InvalidRequest
from app.wire.types import AdamParams, Datum, DimuonParams, ForwardBackwardOutput
from tests.integration.ranks import (
    MICRO_BATCH_TOKENS,
    assert_same_gradients,
    assert_same_outputs,
    many_kinds,
    outputs,
    ranks,
)
from tests.unit.workers.model import model_reference as reference
from tests.unit.workers.model.test_custom_losses_equal_the_clients import bad_index, traced, uploaded
from workers.model.base import BaseModel
from workers.model.engine import Engine, SoloEngine
from workers.model.forward import Work
from workers.model.lora import Adapter
from workers.model.optim import NonFiniteGradient, OptimizerParams, OptimizerState, fresh_state
from workers.model.ranks.leader import ShardedEngine

PARAMS: dict[str, OptimizerParams] = {
    "adamw": AdamParams(learning_rate=2e-3, eps=1e-6, weight_decay=0.1, grad_clip_norm=5.0),
    "dimuon": DimuonParams(learning_rate=2e-3),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    reference.plain_model("qwen3-tied").save_pretrained(made)
    return made


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def many(request: pytest.FixtureRequest, folder: Path) -> Iterator[ShardedEngine]:
    with ranks(request.param, folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def one(folder: Path) -> SoloEngine:
    return SoloEngine(BaseModel.load(folder, dtype=torch.float32), micro_batch_tokens=MICRO_BATCH_TOKENS)


def test_each_rank_has_its_part_of_the_weights(many: ShardedEngine, one: SoloEngine) -> None:
    world = many._group.world
    shards = [p for p in many.base.model.parameters() if isinstance(p, DTensor)]
    mine = sum(p.to_local().numel() for p in shards)
    everything = sum(p.numel() for p in one.base.model.parameters())
    assert sum(p.numel() for p in shards) == everything
    assert mine <= everything / world + len(shards) * reference.SIZES["hidden_size"]
    assert many.base.facts == one.base.facts


def test_a_pass_gives_what_one_process_gives(many: ShardedEngine, one: SoloEngine) -> None:
    mine, alone = many_kinds(many.base), many_kinds(one.base)
    for _ in range(2):  # gradients add up over passes
        assert_same_outputs(outputs(many, mine), outputs(one, alone))
    assert_same_gradients(many, [work.adapter for work in mine], [work.adapter for work in alone])


@pytest.mark.parametrize("backward", [True, False])
def test_one_datum_is_enough_for_any_number_of_ranks(many: ShardedEngine, one: SoloEngine, backward: bool) -> None:
    mine, alone = (
        Work(reference.random_adapter(engine.base, 9), reference.random_data(9, [1]), "cross_entropy", {}, backward)
        for engine in (many, one)
    )
    assert_same_outputs(outputs(many, [mine]), outputs(one, [alone]))
    assert_same_gradients(many, [mine.adapter], [alone.adapter])


def step(engine: Engine, runs: Sequence[tuple[Adapter, OptimizerState, OptimizerParams]]) -> list[dict[str, float]]:
    outcomes = engine.optimizer_step(runs)
    assert not any(isinstance(outcome, NonFiniteGradient) for outcome in outcomes)
    return outcomes  # type: ignore[return-value]


def test_several_runs_train_to_the_same_weights(many: ShardedEngine, one: SoloEngine) -> None:
    def runs(engine: Engine) -> list[tuple[Adapter, OptimizerState, OptimizerParams]]:
        adapters = [reference.random_adapter(engine.base, i, rank) for i, rank in enumerate((2, 5, 4))]
        kinds = ("adamw", "adamw", "dimuon")
        return [(a, fresh_state(kind, a), PARAMS[kind]) for a, kind in zip(adapters, kinds, strict=True)]

    mine, alone = runs(many), runs(one)
    for turn in range(4):
        taking = slice(turn % 2, None)  # not every run in every step
        for engine, own in ((many, mine), (one, alone)):
            for part in range(2):
                data = [reference.random_data(10 * turn + part + i, [7, 19, 4]) for i in range(len(own))]
                outputs(engine, [Work(a, d, "cross_entropy") for (a, _, _), d in zip(own, data, strict=True)][taking])
        for a, b in zip(step(many, mine[taking]), step(one, alone[taking]), strict=True):
            assert a == pytest.approx(b, rel=1e-4)
    for (a, state, _), (b, expected, _) in zip(mine, alone, strict=True):
        assert float((a.flat - b.flat).norm()) <= 1e-5 * float(b.flat.norm())
        for name, moment in expected.tensors().items():
            assert float((state.tensors()[name] - moment).norm()) <= 1e-4 * float(moment.norm())


def test_after_a_step_all_ranks_have_the_same_weights(many: ShardedEngine) -> None:
    adapter = reference.random_adapter(many.base, 1)
    run = (adapter, fresh_state("adamw", adapter), PARAMS["adamw"])
    for _ in range(2):
        outputs(many, [Work(adapter, reference.random_data(1, [9, 9, 9, 9]), "cross_entropy")])
        step(many, [run])
    same = reference.random_data(2, [11]) * many._group.world  # one for each rank
    (output,) = outputs(many, [Work(adapter, same, "cross_entropy", {}, False)])
    assert len({each["logprobs"].tobytes() for each in output.loss_fn_outputs}) == 1


def test_a_gradient_that_is_given_up_is_given_up_on_all_ranks(many: ShardedEngine, one: SoloEngine) -> None:
    mine, alone = reference.random_adapter(many.base, 3), reference.random_adapter(one.base, 3)
    first, second = reference.random_data(3, [5, 6, 7, 8]), reference.random_data(4, [8, 3, 9, 2])
    for engine, adapter in ((many, mine), (one, alone)):
        outputs(engine, [Work(adapter, first, "cross_entropy")])
        adapter.zero_grad()
        outputs(engine, [Work(adapter, second, "cross_entropy")])
    assert_same_gradients(many, [mine], [alone])


@pytest.mark.parametrize("pending", [False, True])
def test_a_request_that_fails_adds_nothing_on_any_rank(many: ShardedEngine, one: SoloEngine, pending: bool) -> None:
    loss = uploaded(traced(bad_index, logprobs=1, w=1))

    def works(base: BaseModel) -> tuple[Work, Work]:
        data = [
            Datum(np.arange(3, dtype=np.int32), {"target_tokens": np.arange(3), "w": np.float32([0, 1, last])})
            for last in (2, 2, 2, 9)
        ]
        bad = Work(reference.random_adapter(base, 1), data, "custom", {"loss_id": "l"}, True, loss)
        return bad, Work(reference.random_adapter(base, 2), reference.random_data(2, [7, 3, 2]), "cross_entropy")

    mine, alone = works(many.base), works(one.base)
    if pending:
        for engine, (bad, _) in ((many, mine), (one, alone)):
            outputs(engine, [Work(bad.adapter, reference.random_data(8, [5, 4, 3, 2]), "cross_entropy")])
    failure, output = many.run_pass(mine)
    expected_failure, expected = one.run_pass(alone)
    assert isinstance(failure, InvalidRequest) and isinstance(expected_failure, InvalidRequest)
    assert failure.detail == expected_failure.detail
    assert_same_outputs([output], [expected])  # type: ignore[list-item]
    assert_same_gradients(many, [work.adapter for work in mine], [work.adapter for work in alone])


def test_bad_data_is_refused_and_the_ranks_go_on(many: ShardedEngine) -> None:
    adapter = reference.random_adapter(many.base, 1)
    token = Datum(np.array([reference.VOCAB], np.int32), {"target_tokens": np.array([1])})
    refused, output = many.run_pass(
        [Work(adapter, [token], "cross_entropy"), Work(adapter, reference.random_data(1, [4]), "cross_entropy")]
    )
    assert isinstance(refused, InvalidRequest) and isinstance(output, ForwardBackwardOutput)


def test_a_nan_stays_with_its_run(many: ShardedEngine, one: SoloEngine) -> None:
    sick = reference.random_adapter(many.base, 1)
    sick.flat[::7] = float("nan")
    mine, alone = reference.random_adapter(many.base, 2), reference.random_adapter(one.base, 2)
    data = reference.random_data(2, [6, 11, 3])
    poisoned, output = outputs(many, [Work(a, data, "cross_entropy") for a in (sick, mine)])
    assert np.isnan(poisoned.metrics["loss:sum"])
    assert_same_outputs([output], outputs(one, [Work(alone, data, "cross_entropy")]))
    assert_same_gradients(many, [mine], [alone])
    (refused,) = many.optimizer_step([(sick, fresh_state("adamw", sick), PARAMS["adamw"])])
    assert isinstance(refused, NonFiniteGradient) and not sick.has_grad


def test_the_ranks_forget_adapters_that_are_gone(many: ShardedEngine) -> None:
    data = reference.random_data(1, [3, 3, 3, 3])
    before = set(many._numbers.values())
    for seed in range(5):
        outputs(many, [Work(reference.random_adapter(many.base, seed), data, "cross_entropy")])
    many._prepare([])
    assert not many._gone
    assert set(many._numbers.values()) | many._spread | many._stale <= before
