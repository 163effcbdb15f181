"""What `draw` draws follows the distribution that the parameters ask for, computed here by hand in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.wire.types import SamplingParams
from tests.engine_suite.distribution import assert_follows, processed
from workers.sample.engines.draw import DrawPlan, draw, stream, uniforms


def drawn(logits: np.ndarray, p: SamplingParams, count: int, seed: int = 0) -> np.ndarray:
    rows = torch.from_numpy(logits).float().expand(count, -1)
    plan = DrawPlan.of([p] * count, [stream(seed, i) for i in range(count)], len(logits), torch.device("cpu"))
    return draw(rows, plan, np.zeros(count, np.int64)).numpy()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=3.0),
        SamplingParams(top_k=5),
        SamplingParams(top_k=1),
        SamplingParams(top_k=0),
        SamplingParams(top_k=1000),
        SamplingParams(top_p=0.7),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=0.99, temperature=2.0),
        SamplingParams(top_k=8, top_p=0.8),
        SamplingParams(top_k=6, top_p=0.5, temperature=1.5),
    ],
    ids=lambda p: f"T={p.temperature},k={p.top_k},p={p.top_p}",
)
@pytest.mark.parametrize("vocab_size", [17, 700])
def test_draws_follow_the_distribution(params: SamplingParams, vocab_size: int) -> None:
    logits = np.random.default_rng(vocab_size).normal(0, 1.0, vocab_size).astype(np.float32).astype(np.float64)
    assert_follows(drawn(logits, params, 20_000), processed(logits, params))


def test_rows_with_different_parameters_do_not_touch_each_other() -> None:
    rng = np.random.default_rng(5)
    kinds = [
        SamplingParams(),
        SamplingParams(temperature=0.0),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.6, temperature=0.7),
        SamplingParams(temperature=2.0),
        SamplingParams(top_p=0.95),
    ]
    logits = rng.normal(0, 1, (60, 500)).astype(np.float32)
    params = [kinds[i % len(kinds)] for i in range(60)]
    streams = [stream(7, i) for i in range(60)]
    cpu = torch.device("cpu")
    together = draw(torch.from_numpy(logits), DrawPlan.of(params, streams, 500, cpu), np.arange(60))
    for i in range(60):
        plan = DrawPlan.of([params[i]], [streams[i]], 500, cpu)
        assert draw(torch.from_numpy(logits[i : i + 1]), plan, np.array([i])).item() == together[i].item()
        if params[i].temperature == 0:
            assert together[i].item() == logits[i].argmax()


@pytest.mark.parametrize("temperature", [1e-3, 1e-7, 1e-30, 5e-324])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = np.array([1.0, 3.0, -2.0, 2.0])
    assert set(drawn(logits, SamplingParams(temperature=temperature), 50)) == {1}


def test_successive_numbers_of_a_stream_and_neighbouring_streams_are_independent() -> None:
    by_position = uniforms(np.full(50_000, stream(1, 0), np.uint64), np.arange(50_000))
    by_index = uniforms(np.array([stream(1, i) for i in range(50_000)], np.uint64), np.zeros(50_000, np.int64))
    by_seed = uniforms(np.array([stream(i, 0) for i in range(50_000)], np.uint64), np.zeros(50_000, np.int64))
    for unit in (by_position, by_index, by_seed):
        assert 0 <= unit.min() < 1e-3
        assert 1 - 1e-3 < unit.max() < 1
        assert_follows((unit * 64).astype(int), np.full(64, 1 / 64))
        assert abs(np.corrcoef(unit[:-1], unit[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(by_index, by_seed)[0, 1]) < 0.03
