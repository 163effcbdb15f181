"""vLLM passes the suite of all engines, and does right where it is known to go wrong."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from app.errors import InvalidRequest
from tests.engine_suite.distribution import assert_follows
from tests.engine_suite.models import ATTENTION, greedy, make_adapter, prompt
from tests.engine_suite.rig import Asked, EngineFactory, Outcomes, Reference, Rig, ask, tokens_of
from tests.engine_suite.suite import *  # noqa: F403
from tests.engine_suite.trouble import not_a_number
from tests.vllm.engines import start
from workers.sample.engines.base import AdapterHandle, EngineFailure
from workers.sample.engines.vllm_adapters import VllmAdapter
from workers.sample.engines.vllm_options import VllmOptions

BLOCK = 128
"""Tokens that vLLM's prefix cache keeps together on a CPU."""
BLOCKS = 200
"""More requests than the engine runs at a time, and as many together as its cache has blocks, about."""
MANY = 12
"""More adapters than the engine has slots, or room for in memory."""


@pytest.fixture(scope="module")
def engine_factory() -> EngineFactory:
    return start


def asked_greedily(rig: Rig, name: str, handle: AdapterHandle | None, count: int = 8) -> list[int]:
    """Tokens after `prompt(150)`: long enough for the prefix cache."""
    outcomes = Outcomes()
    rig.engine.submit(outcomes.job(ask(name, prompt(150), max_tokens=count, temperature=0.0, stop_tokens=()), handle))
    rig.finish(outcomes, 1)
    [tokens] = tokens_of(outcomes.result(name))
    return tokens


def test_other_weights_in_the_same_folder_are_another_adapter(rig: Rig, tmp_path: Path) -> None:
    """vLLM's prefix cache knows an adapter by name and path."""
    folder, found = tmp_path / "adapter", []
    for seed in (21, 22):
        shutil.rmtree(folder, ignore_errors=True)
        make_adapter(rig.model, folder, rank=4, targets=ATTENTION, seed=seed)
        handle = rig.load(f"version-{seed}", folder)
        found.append(asked_greedily(rig, "r", handle))
        rig.engine.unload_adapter(handle)
        expected = Reference(rig.folder / "model", {"it": folder}).models["it"]
        assert found[-1] == greedy(expected, prompt(150), 8)
    assert found[0] != found[1]


def test_any_number_of_adapters_over_few_slots_whose_files_have_gone(rig: Rig, tmp_path: Path) -> None:
    handles, expected = [], []
    for seed in range(MANY):
        folder = tmp_path / str(seed)
        make_adapter(rig.model, folder, rank=2, targets=ATTENTION, seed=100 + seed)
        handles.append(rig.load(str(seed), folder))
        expected.append(greedy(Reference(rig.folder / "model", {"it": folder}).models["it"], prompt(9), 6))
        shutil.rmtree(folder)
    assert len({tuple(tokens) for tokens in expected}) > MANY // 2
    for turn in range(2):
        outcomes = Outcomes()
        for i, handle in enumerate(handles):
            request = ask(f"{turn} {i}", prompt(9), max_tokens=6, temperature=0.0, stop_tokens=())
            rig.engine.submit(outcomes.job(request, handle))
        rig.finish(outcomes, MANY)
        for i, tokens in enumerate(expected):
            assert tokens_of(outcomes.result(f"{turn} {i}")) == [tokens]
    folders = [handle.folder for handle in handles if isinstance(handle, VllmAdapter)]
    assert len(folders) == MANY
    for handle in handles:
        rig.engine.unload_adapter(handle)
    rig.turn_until(lambda: not any(folder.exists() for folder in folders))


def test_an_adapter_that_has_diverged_leaves_nothing_behind(rig: Rig, tmp_path: Path) -> None:
    """Blocks of the cache are used again."""
    folder = shutil.copytree(rig.folder / "adapter-1", tmp_path / "nan")
    not_a_number(folder)
    handle = rig.load("diverged", folder)
    outcomes = Outcomes()
    for i in range(BLOCKS // 2):
        rig.engine.submit(outcomes.job(ask(f"nan {i}", prompt(100, i), max_tokens=1), handle))
    rig.finish(outcomes, BLOCKS // 2)
    rig.engine.unload_adapter(handle)
    assert all(isinstance(outcome, EngineFailure) for outcome in outcomes.values())
    rig.serve(ask(str(i), prompt(9, i), max_tokens=2) for i in range(2 * BLOCKS))


def test_a_rank_above_the_bound_is_refused_and_the_setting_named(rig: Rig, tmp_path: Path) -> None:
    make_adapter(rig.model, tmp_path / "wide", rank=9, targets=ATTENTION, seed=1)
    with pytest.raises(InvalidRequest, match=r"rank 9.*TINWORKS_VLLM_MAX_LORA_RANK"):
        rig.load("wide", tmp_path / "wide")


def test_tokens_out_of_the_prefix_cache_are_counted_once_per_request(rig: Rig) -> None:
    tokens = prompt(BLOCK + 40, seed=77)
    hits = [
        rig.sample(ask(f"r{i}", tokens, max_tokens=2, num_samples=3), "attention").prompt_cache_hit_tokens
        for i in range(2)
    ]
    assert hits == [0, BLOCK]
    assert rig.sample(ask("base", tokens, max_tokens=2)).prompt_cache_hit_tokens == 0


@pytest.mark.parametrize("temperature", [0.004, 4.0])
def test_temperatures_beyond_those_that_vllm_takes(rig: Rig, temperature: float) -> None:
    table = rig.reference.logprobs(prompt(7))[-1]
    result = rig.sample(ask("r", prompt(7), max_tokens=1, num_samples=1000, temperature=temperature, seed=4))
    assert_follows(np.array(tokens_of(result))[:, 0], torch.softmax(table / temperature, -1).numpy())


def test_questions_about_a_prompt_leave_the_others_top_k_alone(rig: Rig) -> None:
    outcomes = Outcomes()
    rig.engine.submit(outcomes.job(ask("top", prompt(5), max_tokens=40, topk_sample_logprobs=3, stop_tokens=())))
    for i in range(10):
        rig.engine.submit(outcomes.job(ask(f"asks {i}", prompt(30 + i), max_tokens=2, alternatives=4)))
    rig.finish(outcomes, 11)
    [sequence] = outcomes.result("top").sequences
    assert sequence.topk is not None
    table = rig.reference.logprobs([*prompt(5), *sequence.tokens.tolist()])[4:-1]
    np.testing.assert_array_equal(sequence.topk.token_ids, table.topk(3, dim=-1).indices)
    rig.check(Asked(ask("top", prompt(5))), outcomes.result("top"))


def test_no_two_starts_draw_the_same_numbers() -> None:
    options = VllmOptions("model", "float32", 256)
    assert options.arguments()["seed"] != options.arguments()["seed"]
