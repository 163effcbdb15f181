"""Sampling through the SDK: every parameter makes the difference that it promises."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker
import torch
from sqlalchemy import select
from tinker import types

from app.db import Database
from app.runs.models import Run
from app.sampling.records import find_recorded
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


@pytest.mark.parametrize("columns", [1, 40])
def test_named_tokens_are_scored_dense_and_sparse(sampler: tinker.SamplingClient, columns: int) -> None:
    """The prompt's own tokens are named in the last column: what comes back are the prompt's logprobs."""
    ids = torch.full((3, columns), -1, dtype=torch.int64)
    ids[:, -1] = torch.tensor(PROMPT.to_ints()[1:])
    ids[0, -1] = -1
    targets = types.TensorData.from_torch_sparse(ids, pad_value=-1)
    assert (targets.sparse_crow_indices is not None) == (columns > 1)
    params = types.SamplingParams(max_tokens=1)
    asked = sampler.sample(PROMPT, 1, params, include_prompt_logprobs=True, target_prompt_logprobs=targets)
    found = asked.result(60)
    scored = found.target_prompt_logprobs
    assert scored.shape == targets.shape and scored.sparse_crow_indices == targets.sparse_crow_indices
    matrix = scored.to_torch()
    assert matrix[:, -1].tolist() == pytest.approx([0.0, *found.prompt_logprobs[2:]], abs=1e-5)
    assert (matrix[:, :-1] == 0).all()


def test_alternatives_are_drawn_at_every_position_of_a_prompt(sampler: tinker.SamplingClient) -> None:
    def draw(**params: object) -> types.PromptAltTokens:
        asked = types.SamplingParams(max_tokens=1, **params)  # type: ignore[arg-type]
        return sampler.sample(PROMPT, 1, asked, topk_prompt_logprobs=1, prompt_alt_tokens_k=5).result(60)

    first, again, other = (draw(seed=seed).prompt_alt_tokens for seed in (1, 1, 2))
    assert first.tokens.shape == first.logprobs.shape == [3, 5]
    assert first.tokens.tolist() == again.tokens.tolist() != other.tokens.tolist()
    greedy = draw(temperature=0.0)
    best = [row[0] for row in greedy.topk_prompt_logprobs[1:]]
    assert greedy.prompt_alt_tokens.tokens.tolist() == [[token] * 5 for token, _ in best]
    assert greedy.prompt_alt_tokens.logprobs.to_torch()[:, 0].tolist() == pytest.approx([lp for _, lp in best])


def test_recorded_samples_are_on_record_as_the_client_got_them(service) -> None:  # type: ignore[no-untyped-def]
    client = tinker.ServiceClient(base_url=service.base_url, api_key="tml-recorded")
    run = client.create_lora_training_client(base_model=MODEL, rank=4).result(30)
    recording = run.save_weights_and_get_sampling_client(record_stability_info=True).result(30)
    params = types.SamplingParams(max_tokens=6, stop=[])
    futures = [recording.sample(PROMPT, 3, params) for _ in range(4)]
    sampled = [sequence for future in futures for sequence in future.result(60).sequences]
    plain = client.create_sampling_client(base_model=MODEL).sample(PROMPT, 1, params).result(60).sequences[0]
    ids = [sequence.sequence_id for sequence in sampled]
    database = Database(service.database_url)
    with database.read() as session:
        owner_id = session.scalar(select(Run.owner_id).where(Run.id == run.model_id))
        session_id = run.model_id.partition(":")[0]
        wanted = [*ids, plain.sequence_id]
        found = find_recorded(session, owner_id=owner_id, session_id=session_id, sequence_ids=wanted)
    database.dispose()
    assert set(found) == set(ids) and len(set(ids)) == 12
    for sequence in sampled:
        kept = found[sequence.sequence_id]
        assert (kept.tokens.tolist(), kept.logprobs.tolist()) == (sequence.tokens, sequence.logprobs)
        assert kept.prompt.tolist() == PROMPT.to_ints()


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
