"""A researcher's program on an SDK of some age, run by that SDK's own Python: `old_sdk_script.py BASE_URL`.

It uses what every SDK from 0.10 on has, and what the one at hand has besides. Anything that is not as it should be ends
it with a traceback; the last line of its output says what it did.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tarfile
import traceback
import urllib.request
import uuid
from typing import Any

import numpy as np
import tinker
import torch
from tinker import types

VOCABULARY = 2048
ADAM = types.AdamParams(learning_rate=2e-3, eps=1e-8)
WAIT_S = 120


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def batch(count: int, length: int) -> list[types.Datum]:
    """Random next-token data."""
    draw = random.Random(7)
    rows = [[draw.randrange(3, VOCABULARY) for _ in range(length + 1)] for _ in range(count)]
    weights = np.ones(length, np.float32)
    return [datum(row[:-1], target_tokens=np.array(row[1:], np.int64), weights=weights) for row in rows]


def logprobs(training: tinker.TrainingClient, data: list[types.Datum]) -> np.ndarray:
    output = training.forward(data, "cross_entropy").result(WAIT_S)
    assert len(output.loss_fn_outputs) == len(data)
    found = np.concatenate([np.asarray(each["logprobs"].tolist()) for each in output.loss_fn_outputs])
    assert np.isclose(output.metrics["loss:sum"], -found.sum(), rtol=1e-3)
    return found


def train(training: tinker.TrainingClient, data: list[types.Datum]) -> None:
    """Steps in a pipeline; the loss falls."""
    passes, steps = [], []
    for _ in range(4):
        passes.append(training.forward_backward(data, "cross_entropy"))
        steps.append(training.optim_step(ADAM))
    losses = [each.result(WAIT_S).metrics["loss:sum"] for each in passes]
    for step in steps:
        step.result(WAIT_S)
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0], losses


def train_on_several_targets(training: tinker.TrainingClient) -> None:
    """[N, K] targets, which SDKs send as sparse arrays."""
    targets, weights = torch.zeros(12, 8, dtype=torch.int64), torch.zeros(12, 8)
    targets[:, 0], weights[:, 0] = torch.arange(12) + 5, 1.0
    data = [datum(list(range(4, 16)), target_tokens=targets, weights=weights)]
    output = training.forward_backward(data, "cross_entropy").result(WAIT_S)
    first = np.asarray(output.loss_fn_outputs[0]["logprobs"].tolist()).reshape(12, 8)[:, 0]
    assert np.isclose(output.metrics["loss:sum"], -first.sum(), rtol=1e-3)
    training.optim_step(ADAM).result(WAIT_S)


def train_with_a_loss_of_ones_own(training: tinker.TrainingClient, data: list[types.Datum]) -> None:
    def loss(data: Any, found: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        value = sum((each**2).sum() for each in found)
        assert isinstance(value, torch.Tensor)
        return value, {"squares:sum": float(value.detach())}

    before = training.forward_backward_custom(data, loss).result(WAIT_S).metrics["squares:sum"]
    training.optim_step(ADAM).result(WAIT_S)
    after = training.forward_backward_custom(data, loss).result(WAIT_S).metrics["squares:sum"]
    training.optim_step(ADAM).result(WAIT_S)
    assert after < before


def fail_and_go_on(training: tinker.TrainingClient, data: list[types.Datum]) -> None:
    bad = training.forward_backward([datum([10**6], target_tokens=np.array([1]))], "cross_entropy")
    good = training.forward_backward(data, "cross_entropy")
    try:
        bad.result(WAIT_S)
    except tinker.RequestFailedError as error:
        assert "token 1000000" in str(error), error
    else:
        raise AssertionError("a token outside the vocabulary was taken")
    good.result(WAIT_S)
    training.optim_step(ADAM).result(WAIT_S)


def save_and_load(
    service: tinker.ServiceClient, training: tinker.TrainingClient, data: list[types.Datum]
) -> tuple[str, np.ndarray]:
    """A state comes back in the run that saved it, and in new ones. Returns its path and what it gives the data."""
    path = training.save_state("first").result(WAIT_S).path
    saved = logprobs(training, data)
    train(training, data)
    training.load_state(path).result(WAIT_S)
    assert np.allclose(logprobs(training, data), saved, atol=1e-4)
    training.load_state_with_optimizer(path).result(WAIT_S)
    assert np.allclose(logprobs(training, data), saved, atol=1e-4)
    for create in (
        service.create_training_client_from_state,
        service.create_training_client_from_state_with_optimizer,
    ):
        other = create(path)
        assert np.allclose(logprobs(other, data), saved, atol=1e-4)
        train(other, data)
    return path, saved


def sample(sampling: tinker.SamplingClient) -> None:
    prompt = types.ModelInput.from_ints([5, 6, 7, 8])
    params = types.SamplingParams(max_tokens=4, temperature=0.7, seed=3, stop=[])
    answer = sampling.sample(
        prompt=prompt,
        num_samples=2,
        sampling_params=params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result(WAIT_S)
    assert [len(each.tokens) for each in answer.sequences] == [4, 4]
    assert all(each.logprobs and len(each.logprobs) == 4 for each in answer.sequences)
    assert {each.stop_reason for each in answer.sequences} == {"length"}
    known = answer.prompt_logprobs
    assert known is not None and known[0] is None and all(isinstance(each, float) for each in known[1:])
    best = answer.topk_prompt_logprobs
    assert best is not None and best[0] is None and [len(row or ()) for row in best[1:]] == [3, 3, 3]
    computed = sampling.compute_logprobs(prompt).result(WAIT_S)
    assert computed[0] is None and np.allclose(computed[1:], known[1:], atol=1e-4)


def look_at_everything(service: tinker.ServiceClient, run: str, state: str, sampler: str) -> None:
    """What the REST client of the SDK offers."""
    rest = service.create_rest_client()
    models = service.get_server_capabilities().supported_models
    assert "tiny" in [model.model_name for model in models]
    assert run in [each.training_run_id for each in rest.list_training_runs().result(WAIT_S).training_runs]
    assert rest.get_training_run(run).result(WAIT_S).lora_rank == 4
    assert rest.get_training_run_by_tinker_path(state).result(WAIT_S).training_run_id == run
    assert rest.get_weights_info_by_tinker_path(state).result(WAIT_S).lora_rank == 4
    session_id = run.partition(":")[0]
    assert session_id in rest.list_sessions().result(WAIT_S).sessions
    found = rest.get_session(session_id).result(WAIT_S)
    assert run in found.training_run_ids
    assert rest.get_sampler(found.sampler_ids[0]).result(WAIT_S).base_model
    own = [each.tinker_path for each in rest.list_checkpoints(run).result(WAIT_S).checkpoints]
    assert sorted(own) == sorted([state, sampler])
    assert set(own) <= {each.tinker_path for each in rest.list_user_checkpoints().result(WAIT_S).checkpoints}
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        signed = rest.get_checkpoint_archive_url_from_tinker_path(sampler).result(WAIT_S)
        with urllib.request.urlopen(signed.url) as answer, tarfile.open(fileobj=answer, mode="r|") as archive:
            assert "adapter_config.json" in archive.getnames()
    if hasattr(rest, "set_checkpoint_ttl_from_tinker_path"):  # 0.14 and later
        rest.set_checkpoint_ttl_from_tinker_path(state, 3600).result(WAIT_S)
        rest.set_checkpoint_ttl_from_tinker_path(state, None).result(WAIT_S)
    rest.publish_checkpoint_from_tinker_path(sampler).result(WAIT_S)
    rest.unpublish_checkpoint_from_tinker_path(sampler).result(WAIT_S)
    rest.delete_checkpoint_from_tinker_path(sampler).result(WAIT_S)
    assert [each.tinker_path for each in rest.list_checkpoints(run).result(WAIT_S).checkpoints] == [state]


def unload(training: tinker.TrainingClient) -> None:
    """What only SDKs before 0.25 send, and only for those who reach below their surface."""
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
    from tinker.types.unload_model_request import UnloadModelRequest

    async def send() -> str:
        with training.holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            future = await client.models.unload(request=UnloadModelRequest(model_id=training.model_id))
            return str(future.request_id)

    assert asyncio.run_coroutine_threadsafe(send(), training.holder._loop).result(WAIT_S)
    try:
        training.optim_step(ADAM).result(WAIT_S)
    except tinker.RequestFailedError as error:
        assert "was unloaded" in str(error), error
    else:
        raise AssertionError("an unloaded run took a step")


def main(base_url: str) -> None:
    service = tinker.ServiceClient(base_url=base_url, api_key=f"tml-{uuid.uuid4().hex}")
    training = service.create_lora_training_client(base_model="tiny", rank=4, seed=1)
    assert training.get_info().model_data.model_name
    data = batch(3, 12)
    train(training, data)
    assert len(logprobs(training, batch(140, 2))) == 280  # more than one request on most SDKs
    train_on_several_targets(training)
    train_with_a_loss_of_ones_own(training, data)
    fail_and_go_on(training, data)
    state, _ = save_and_load(service, training, data)
    named = training.save_weights_for_sampler("first").result(WAIT_S).path
    for sampling in (
        service.create_sampling_client(base_model="tiny"),
        service.create_sampling_client(model_path=named),
        training.save_weights_and_get_sampling_client(),
    ):
        sample(sampling)
    run = state.removeprefix("tinker://").partition("/")[0]
    look_at_everything(service, run, state, named)
    if tuple(map(int, tinker.__version__.split(".")[:2])) < (0, 25):
        unload(training)
    print(json.dumps({"version": tinker.__version__, "package": os.path.dirname(tinker.__file__)}), flush=True)


if __name__ == "__main__":
    status = 1
    try:
        main(sys.argv[1])
        status = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # not every SDK's threads let go of their interpreter
