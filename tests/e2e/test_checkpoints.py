"""Saving and loading, in place and as a new run, with the optimizer and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tinker
from tinker import types

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, largest_gap, logprobs, train

DATA = batch(21, [30, 12])


def _trained(client: tinker.ServiceClient, steps: int = 3) -> tinker.TrainingClient:
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=3).result()
    train(run, DATA, steps)
    return run


def test_a_run_resumes_where_it_was_saved(client: tinker.ServiceClient) -> None:
    run = _trained(client)
    path = run.save_state("resume").result(30).path
    train(run, DATA, 3)
    resumed = client.create_training_client_from_state_with_optimizer(path).result(30)
    train(resumed, DATA, 3)
    assert largest_gap(logprobs(run, DATA), logprobs(resumed, DATA)) < 1e-4


def test_without_the_optimizer_the_moments_are_fresh(client: tinker.ServiceClient) -> None:
    run = _trained(client)
    path = run.save_state("weights-only").result(30).path
    fresh = client.create_training_client_from_state(path).result(30)
    assert largest_gap(logprobs(run, DATA), logprobs(fresh, DATA)) < 1e-5
    train(run, DATA, 3)
    train(fresh, DATA, 3)
    assert largest_gap(logprobs(run, DATA), logprobs(fresh, DATA)) > 1e-3


@pytest.mark.filterwarnings("ignore")
def test_loading_in_place_restores_weights_and_moments(client: tinker.ServiceClient) -> None:
    run = _trained(client)
    path = run.save_state("in-place").result(30).path
    train(run, DATA, 3)
    after = logprobs(run, DATA)
    run.load_state_with_optimizer(path).result(30)
    train(run, DATA, 3)
    assert largest_gap(after, logprobs(run, DATA)) < 1e-4


def test_pending_gradients_are_part_of_the_state(client: tinker.ServiceClient) -> None:
    run = _trained(client)
    run.forward_backward(DATA, "cross_entropy").result(30)
    path = run.save_state("mid-sum").result(30).path
    resumed = client.create_training_client_from_state_with_optimizer(path).result(30)
    for each in (run, resumed):
        each.optim_step(types.AdamParams(learning_rate=2e-3, eps=1e-8)).result(30)
    assert largest_gap(logprobs(run, DATA), logprobs(resumed, DATA)) < 1e-5


def test_a_name_is_used_once_unless_overwritten(client: tinker.ServiceClient) -> None:
    run = _trained(client, 1)
    run.save_state("twice").result(30)
    with pytest.raises(tinker.TinkerError, match="overwrite"):
        run.save_state("twice").result(30)
    run.save_weights_for_sampler("twice").result(30)


def test_a_named_sampler_checkpoint_keeps_its_weights(client: tinker.ServiceClient) -> None:
    run = _trained(client)
    prompt = types.ModelInput.from_ints([5, 6, 7, 8, 9])
    path = run.save_weights_for_sampler("fixed").result(30).path
    sampler = client.create_sampling_client(model_path=path)
    before = sampler.compute_logprobs(prompt).result(30)
    train(run, DATA, 5)
    assert sampler.compute_logprobs(prompt).result(30)[1:] == before[1:]
    newer = run.save_weights_and_get_sampling_client().result(30).compute_logprobs(prompt).result(30)
    assert max(abs(a - b) for a, b in zip(newer[1:], before[1:], strict=True)) > 1e-3


def test_checkpoints_of_others_cannot_be_loaded(connect: Callable[..., tinker.ServiceClient]) -> None:
    path = _trained(connect(), 1).save_state("private").result(30).path
    with pytest.raises(tinker.TinkerError, match="no checkpoint"):
        connect().create_training_client_from_state(path).result(30)


def test_loading_a_path_that_is_not_there_fails_by_name(client: tinker.ServiceClient) -> None:
    run = _trained(client, 1)
    path = run.save_state("there").result(30).path
    with pytest.raises(tinker.TinkerError, match="no checkpoint"):
        client.create_training_client_from_state(path + "-not").result(30)
