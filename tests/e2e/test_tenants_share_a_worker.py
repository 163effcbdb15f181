"""Several clients at once on one worker: each trains as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import tinker
from tinker import types

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, largest_gap, logprobs, train

RUNS = [(4, 11, [40, 17]), (16, 12, [64]), (8, 13, [5, 30, 22])]
STEPS = 8


def _train_one(client: tinker.ServiceClient, rank: int, seed: int, lengths: list[int]) -> list[list[float]]:
    training = client.create_lora_training_client(base_model=MODEL, rank=rank, seed=seed).result()
    data = batch(seed, lengths)
    train(training, data, STEPS)
    return logprobs(training, data)


def test_clients_of_any_rank_train_together_as_if_alone(connect: Callable[..., tinker.ServiceClient]) -> None:
    alone = [_train_one(connect(), *run) for run in RUNS]
    with ThreadPoolExecutor(len(RUNS)) as pool:
        together = list(pool.map(lambda run: _train_one(connect(), *run), RUNS))
    for one, other in zip(alone, together, strict=True):
        assert largest_gap(one, other) < 1e-3


def test_interleaved_runs_step_with_their_own_parameters(client: tinker.ServiceClient) -> None:
    """fb(A), fb(B), step(A), step(B), submitted without waiting, equals each run alone."""
    data_a, data_b = batch(1, [30]), batch(2, [30])
    runs = [client.create_lora_training_client(base_model=MODEL, rank=8, seed=5).result() for _ in range(4)]
    step = types.AdamParams(learning_rate=2e-3, eps=1e-8)
    for _ in range(5):
        futures = [
            runs[0].forward_backward(data_a, "cross_entropy"),
            runs[1].forward_backward(data_b, "cross_entropy"),
            runs[0].optim_step(step),
            runs[1].optim_step(step),
        ]
    for future in futures:
        future.result(60)
    for run, data in ((runs[2], data_a), (runs[3], data_b)):
        train(run, data, 5)
    assert largest_gap(logprobs(runs[0], data_a), logprobs(runs[2], data_a)) < 1e-3
    assert largest_gap(logprobs(runs[1], data_b), logprobs(runs[3], data_b)) < 1e-3


def test_gradients_add_up_until_the_step(client: tinker.ServiceClient) -> None:
    """Two forward_backward calls and a step equal one call with all the data."""
    halves, whole = (batch(3, [20, 33]), batch(4, [25])), batch(3, [20, 33]) + batch(4, [25])
    step = types.AdamParams(learning_rate=2e-3, eps=1e-8)
    split = client.create_lora_training_client(base_model=MODEL, rank=8, seed=6).result()
    for half in halves:
        split.forward_backward(half, "cross_entropy")
    split.optim_step(step).result(60)
    joint = client.create_lora_training_client(base_model=MODEL, rank=8, seed=6).result()
    joint.forward_backward(whole, "cross_entropy")
    joint.optim_step(step).result(60)
    assert largest_gap(logprobs(split, whole), logprobs(joint, whole)) < 1e-4


def test_a_step_with_nothing_to_do_changes_nothing(client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=7).result()
    data = batch(5, [20])
    train(run, data, 2)
    before = logprobs(run, data)
    metrics = run.optim_step(types.AdamParams(learning_rate=1.0)).result(30).metrics
    assert metrics["update_norm"] == 0.0
    assert logprobs(run, data) == before


def test_chunks_of_a_large_batch_all_count(client: tinker.ServiceClient) -> None:
    """2,500 datums travel as three requests, the first one last; the sum is that of explicit calls."""
    data = [d for i in range(2500) for d in batch(i, [2])]
    step = types.AdamParams(learning_rate=2e-3, eps=1e-8)
    whole = client.create_lora_training_client(base_model=MODEL, rank=4, seed=8).result()
    output = whole.forward_backward(data, "cross_entropy").result(120)
    assert len(output.loss_fn_outputs) == 2500
    whole.optim_step(step).result(60)
    parts = client.create_lora_training_client(base_model=MODEL, rank=4, seed=8).result()
    for start in range(0, 2500, 900):
        parts.forward_backward(data[start : start + 900], "cross_entropy").result(120)
    parts.optim_step(step).result(60)
    assert largest_gap(logprobs(whole, data[:20]), logprobs(parts, data[:20])) < 1e-4
