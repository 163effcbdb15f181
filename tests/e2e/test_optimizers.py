"""Dimuon through the SDK: chosen at creation, trained with, saved and resumed."""

from __future__ import annotations

import pytest
import tinker
from tinker import types

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, largest_gap, logprobs

DATA = batch(31, [30, 12])
STEP = types.DimuonParams(learning_rate=1e-2, grad_clip_norm=1.0)


def _train(run: tinker.TrainingClient, steps: int) -> list[float]:
    """The loss before each of the pipelined steps."""
    futures = []
    for _ in range(steps):
        futures.append(run.forward_backward(DATA, "cross_entropy"))
        run.optim_step(STEP)
    return [future.result(120).metrics["loss:sum"] for future in futures]


def test_dimuon_trains_and_resumes_as_if_uninterrupted(client: tinker.ServiceClient) -> None:
    config = types.DimuonOptimizerConfig()
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=3, optimizer=config).result()
    losses = _train(run, 6)
    assert losses[-1] < 0.9 * losses[0]
    metrics = run.optim_step(STEP).result(60).metrics
    assert metrics is not None and metrics["update_norm"] == 0.0
    path = run.save_state("dimuon").result(60).path
    _train(run, 3)
    resumed = client.create_training_client_from_state_with_optimizer(path).result(60)
    _train(resumed, 3)
    assert largest_gap(logprobs(run, DATA), logprobs(resumed, DATA)) < 1e-4


def test_the_optimizer_is_chosen_anew_where_only_weights_are_loaded(client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=3).result()
    path = run.save_state("start").result(60).path
    dimuon = client.create_training_client_from_state(path, optimizer=types.DimuonOptimizerConfig()).result(60)
    losses = _train(dimuon, 4)
    assert losses[-1] < losses[0]
    adam = client.create_training_client_from_state(dimuon.save_state("next").result(60).path).result(60)
    adam.optim_step(types.AdamParams()).result(60)
    with pytest.raises(tinker.TinkerError, match="optimizer_params: this run's optimizer is adamw; send adam_params"):
        adam.optim_step(STEP).result(60)
    with pytest.raises(tinker.TinkerError, match="adam_params: this run's optimizer is dimuon; send optimizer_params"):
        dimuon.optim_step(types.AdamParams()).result(60)
