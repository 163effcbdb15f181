"""Sampling through the SDK: every parameter makes the difference that it promises."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker
from tinker import types

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, train

PROMPT = types.ModelInput.from_ints([50, 60, 70, 80])


@pytest.fixture(scope="module")
def sampler(service) -> tinker.SamplingClient:  # type: ignore[no-untyped-def]
    client = tinker.ServiceClient(base_url=service.base_url, api_key="tml-sampling")
    return client.create_sampling_client(base_model=MODEL)


def _tokens(sampler: tinker.SamplingClient, n: int = 1, **params: object) -> list[list[int]]:
    request = types.SamplingParams(**{"max_tokens": 8, "stop": [], **params})  # type: ignore[arg-type]
    return [list(s.tokens) for s in sampler.sample(PROMPT, n, request).result(60).sequences]


def test_a_seed_repeats_and_its_sequences_differ(sampler: tinker.SamplingClient) -> None:
    first, again = _tokens(sampler, 8, seed=1), _tokens(sampler, 8, seed=1)
    assert first == again
    assert len({tuple(tokens) for tokens in first}) > 1
    assert _tokens(sampler, 8, seed=2) != first


def test_without_a_seed_nothing_repeats(sampler: tinker.SamplingClient) -> None:
    assert _tokens(sampler, 4) != _tokens(sampler, 4)


def test_temperature_zero_and_top_k_one_are_greedy(sampler: tinker.SamplingClient) -> None:
    greedy = _tokens(sampler, temperature=0.0)
    assert _tokens(sampler, temperature=0.0) == greedy
    assert _tokens(sampler, top_k=1, seed=3) == greedy
    assert _tokens(sampler, top_p=1e-6, seed=4) == greedy


def test_stops_end_a_sequence_and_stay_in_it(sampler: tinker.SamplingClient, client: tinker.ServiceClient) -> None:
    tokenizer = client.create_lora_training_client(base_model=MODEL, rank=1).result(30).get_tokenizer()
    greedy = _tokens(sampler, temperature=0.0)[0]
    stop = greedy[3]
    result = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=8, temperature=0.0, stop=[stop])).result(60)
    sequence = result.sequences[0]
    assert list(sequence.tokens) == greedy[: greedy.index(stop) + 1] and sequence.stop_reason == "stop"
    text = tokenizer.decode(greedy[:3])
    result = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=8, temperature=0.0, stop=[text])).result(60)
    assert result.sequences[0].stop_reason == "stop" and len(result.sequences[0].tokens) <= 3


def test_max_tokens_ends_with_length(sampler: tinker.SamplingClient) -> None:
    result = sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=5, stop=[])).result(60)
    assert len(result.sequences[0].tokens) == 5 and result.sequences[0].stop_reason == "length"


def test_sampled_logprobs_are_what_scoring_gives(sampler: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=6, temperature=0.5, seed=1, stop=[])
    sequence = sampler.sample(PROMPT, 1, params).result(60).sequences[0]
    whole = types.ModelInput.from_ints([*PROMPT.to_ints(), *sequence.tokens])
    scored = sampler.compute_logprobs(whole).result(60)
    assert list(sequence.logprobs) == pytest.approx(scored[4:], abs=1e-4)


def test_prompt_logprobs_and_top_k(sampler: tinker.SamplingClient) -> None:
    result = sampler.sample(
        PROMPT, 1, types.SamplingParams(max_tokens=1), include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result(60)
    assert len(result.prompt_logprobs) == 4
    assert result.prompt_logprobs[0] is None or math.isnan(result.prompt_logprobs[0])
    rows = result.topk_prompt_logprobs
    assert rows[0] is None and all(len(row) == 3 for row in rows[1:])
    assert all(row[0][1] >= row[1][1] >= row[2][1] for row in rows[1:])


def test_trainer_and_sampler_agree(service) -> None:  # type: ignore[no-untyped-def]
    client = tinker.ServiceClient(base_url=service.base_url, api_key="tml-agree")
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result(30)
    data = batch(41, [20])
    train(run, data, 4)
    trainer = run.forward(data, "cross_entropy").result(30).loss_fn_outputs[0]["logprobs"].tolist()
    tokens = data[0].model_input.to_ints()
    targets = list(data[0].loss_fn_inputs["target_tokens"].data)
    sampler = run.save_weights_and_get_sampling_client().result(30)
    scored = sampler.compute_logprobs(types.ModelInput.from_ints([*tokens, targets[-1]])).result(30)
    assert scored[1:] == pytest.approx(trainer, abs=1e-4)


def test_several_adapters_and_the_base_sample_at_once(service, sampler) -> None:  # type: ignore[no-untyped-def]
    client = tinker.ServiceClient(base_url=service.base_url, api_key="tml-adapters")
    samplers = [sampler]
    for seed, rank in ((1, 4), (2, 16)):
        run = client.create_lora_training_client(base_model=MODEL, rank=rank, seed=seed).result(30)
        train(run, batch(seed, [30]), 6, lr=1e-2)
        samplers.append(run.save_weights_and_get_sampling_client().result(30))
    alone = [_tokens(each, temperature=0.0) for each in samplers]
    assert len({str(tokens) for tokens in alone}) == 3
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda i: _tokens(samplers[i % 3], temperature=0.0), range(24)))
    assert all(tokens == alone[i % 3] for i, tokens in enumerate(together))


def test_two_hundred_concurrent_samples_are_all_answered(sampler: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=4, stop=[])
    futures = [sampler.sample(PROMPT, 1, params) for _ in range(200)]
    assert all(len(future.result(60).sequences[0].tokens) == 4 for future in futures)


def test_running_samples_do_not_delay_a_doorbell(service, sampler) -> None:  # type: ignore[no-untyped-def]
    """500 long samples are in flight; an optimizer step is done long before they are."""
    client = tinker.ServiceClient(base_url=service.base_url, api_key="tml-doorbell")
    run = client.create_lora_training_client(base_model=MODEL, rank=4).result(30)
    params = types.SamplingParams(max_tokens=300, stop=[])
    futures = [sampler.sample(PROMPT, 1, params) for _ in range(500)]
    run.forward_backward(batch(1, [8]), "cross_entropy").result(60)
    run.optim_step(types.AdamParams()).result(60)
    assert not all(future.done() for future in futures)
    for future in futures:
        future.result(150)
