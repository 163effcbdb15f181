"""The README's quickstart through the official SDK: train, snapshot, sample, score."""

from __future__ import annotations

import math

import tinker
from tinker import types

from tests.e2e.conftest import MODEL
from tests.e2e.data import datum

PAIRS = [("banana split", "anana-bay plit-say"), ("quantum physics", "uantum-qay hysics-pay")]


def test_fine_tuning_teaches_the_answer(client: tinker.ServiceClient) -> None:
    training = client.create_lora_training_client(base_model=MODEL, rank=16).result()
    tokenizer = training.get_tokenizer()
    data, prompts = [], []
    for english, pig_latin in PAIRS:
        prompt = tokenizer.encode(f"English: {english}\nPig Latin:")
        answer = tokenizer.encode(f" {pig_latin}\n")
        tokens = prompt + answer
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
        data.append(datum(tokens[:-1], tokens[1:], weights))
        prompts.append((prompt, answer))
    losses = []
    for _ in range(60):
        forward = training.forward_backward(data, "cross_entropy")
        step = training.optim_step(types.AdamParams(learning_rate=3e-3))
        losses.append(forward.result(60).metrics["loss:sum"])
        assert math.isfinite(step.result(60).metrics["grad_norm"])
    assert losses[-1] < 0.1 * losses[0]

    sampler = training.save_weights_and_get_sampling_client().result()
    for prompt, answer in prompts:
        params = types.SamplingParams(max_tokens=len(answer), temperature=0.0, stop=[])
        result = sampler.sample(types.ModelInput.from_ints(prompt), 1, params).result(60)
        assert list(result.sequences[0].tokens) == answer
        scored = sampler.compute_logprobs(types.ModelInput.from_ints(prompt + answer)).result(60)
        assert scored[0] is None or math.isnan(scored[0])
        assert sum(scored[len(prompt) :]) > -1.0


def test_what_a_client_asks_of_the_server(client: tinker.ServiceClient) -> None:
    names = [model.model_name for model in client.get_server_capabilities().supported_models]
    assert MODEL in names
    training = client.create_lora_training_client(base_model=MODEL, rank=4).result()
    info = training.get_info()
    assert info.lora_rank == 4 and info.is_lora
    assert info.model_data.model_name in names


def test_a_with_block_finishes_the_session(service, connect) -> None:  # type: ignore[no-untyped-def]
    with connect() as client:
        training = client.create_lora_training_client(base_model=MODEL, rank=4).result()
        training.optim_step(types.AdamParams()).result(30)
    from sqlalchemy import select

    from app.db import Database
    from app.sessions.models import ClientSession

    session_id = training.model_id.split(":")[0]
    with Database(service.database_url).read() as session:
        row = session.scalar(select(ClientSession).where(ClientSession.id == session_id))
    assert row is not None and row.finish_reason == "success"
