"""Tokens and logprobs are those of plain transformers and PEFT, whoever shares the batch."""

from __future__ import annotations

import random

import numpy as np
import pytest

from app.wire.types import NO_TOKEN_LOGPROB
from tests.engine_suite.models import VOCAB, greedy, prompt
from tests.engine_suite.rig import TOLERANCE, WHO, Asked, Outcomes, Rig, ask, tokens_of


@pytest.mark.parametrize("who", WHO)
def test_greedy_tokens_of_a_request_that_is_alone(rig: Rig, who: str | None) -> None:
    tokens = prompt(9)
    asked = Asked(ask("r", tokens, max_tokens=16, temperature=0.0, stop_tokens=()), who)
    result = rig.sample(asked.request, who)
    assert tokens_of(result) == [greedy(rig.reference.models[who], tokens, 16)]
    rig.check(asked, result)
    if who is not None:
        assert tokens_of(result) != [greedy(rig.reference.models[None], tokens, 16)]


def test_base_model_and_adapters_in_one_batch(rig: Rig) -> None:
    asked = {
        f"{who} {n}": Asked(
            ask(f"{who} {n}", prompt(n), max_tokens=12, temperature=0.0, stop_tokens=(), prompt_logprobs=n == 7), who
        )
        for n in (1, 7, 40)
        for who in WHO
    }
    for name, result in rig.serve(asked.values()).items():
        rig.check(asked[name], result)
        if result.prompt_logprobs is not None:
            expected = rig.reference.next_logprobs(prompt(7), asked[name].who)
            np.testing.assert_allclose(result.prompt_logprobs[1:], expected, atol=TOLERANCE, rtol=0)


def test_the_same_prompt_for_everybody_at_once(rig: Rig) -> None:
    """What is kept of a prompt belongs to the weights that read it."""
    tokens = prompt(48)
    asked = {
        f"{who} {i}": Asked(ask(f"{who} {i}", tokens, max_tokens=6, temperature=0.0, stop_tokens=()), who)
        for i in range(3)
        for who in WHO
    }
    for name, result in rig.serve(asked.values()).items():
        rig.check(asked[name], result)
        assert 0 <= result.prompt_cache_hit_tokens <= len(tokens)


def test_forty_requests_of_all_kinds_that_come_and_go(rig: Rig) -> None:
    rng = random.Random(5)
    asked: dict[str, Asked] = {}
    outcomes = Outcomes()
    for i in range(40):
        request = ask(
            f"r{i}",
            prompt(rng.choice([1, 2, 5, 17, 60, 120]), seed=rng.randint(0, 1)),
            max_tokens=rng.choice([1, 2, 5, 20, 40]),
            seed=rng.randint(-5, 5),
            num_samples=rng.choice([1, 1, 2, 4]),
            temperature=rng.choice([0.0, 1.0, 0.7]),
            top_k=rng.choice([-1, -1, 5]),
            top_p=rng.choice([1.0, 0.8]),
            prompt_logprobs=rng.random() < 0.3,
            topk_sample_logprobs=rng.choice([0, 0, 2]),
            stop_tokens=tuple(rng.sample(range(VOCAB), 3)),
        )
        asked[request.request_id] = Asked(request, rng.choice(WHO))
        rig.engine.submit(outcomes.job(request, rig.handles[asked[request.request_id].who]))
        for _ in range(rng.choice([0, 0, 1, 4])):
            rig.engine.step()
    rig.finish(outcomes, len(asked))
    for name, each in asked.items():
        result = outcomes.result(name)
        assert len(result.sequences) == each.request.num_samples
        rig.check(each, result)
        if each.request.prompt_logprobs and len(each.request.prompt) > 1:
            assert result.prompt_logprobs is not None
            expected = rig.reference.next_logprobs(each.request.prompt, each.who)
            np.testing.assert_allclose(result.prompt_logprobs[1:], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("params", [{"temperature": 0.3}, {"temperature": 2.5}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
def test_logprobs_are_of_the_untempered_distribution(rig: Rig, params: dict[str, float]) -> None:
    asked = Asked(ask("r", prompt(6), max_tokens=8, seed=3, stop_tokens=(), **params), "attention")
    rig.check(asked, rig.sample(asked.request, asked.who))


def test_topk_of_sampled_positions(rig: Rig) -> None:
    tokens, who = prompt(5), "unembedding"
    more = VOCAB + 5
    asked = [
        Asked(ask("top", tokens, max_tokens=6, seed=1, num_samples=2, topk_sample_logprobs=3, stop_tokens=()), who),
        Asked(ask("none", tokens, max_tokens=6, seed=1)),
        Asked(ask("more", tokens, max_tokens=2, seed=1, topk_sample_logprobs=more, stop_tokens=())),
    ]
    got = rig.serve(asked)
    assert got["none"].sequences[0].topk is None
    for sequence in got["top"].sequences:
        assert sequence.topk is not None
        best = rig.reference.logprobs([*tokens, *sequence.tokens.tolist()], who)[4:-1].topk(3, dim=-1)
        np.testing.assert_allclose(sequence.topk.logprobs, best.values, atol=TOLERANCE, rtol=0)
        np.testing.assert_array_equal(sequence.topk.token_ids, best.indices)
    topk = got["more"].sequences[0].topk
    assert topk is not None
    assert topk.token_ids.shape == (2, more)
    assert (topk.token_ids[:, VOCAB:] == 0).all()
    assert (topk.logprobs[:, VOCAB:] == np.float32(NO_TOKEN_LOGPROB)).all()
    assert sorted(topk.token_ids[0, :VOCAB].tolist()) == list(range(VOCAB))


def test_tokens_are_told_as_they_are_drawn(rig: Rig) -> None:
    outcomes = Outcomes()
    request = ask("r", prompt(6), max_tokens=7, num_samples=3, seed=2, topk_sample_logprobs=2, stop_tokens=())
    rig.engine.submit(outcomes.job(request, rig.handles["all layers"]))
    rig.finish(outcomes, 1)
    for index, sequence in enumerate(outcomes.result("r").sequences):
        told = [token for token in outcomes.streamed["r"] if token.index == index]
        assert [token.position for token in told] == list(range(7))
        assert [token.token for token in told] == sequence.tokens.tolist()
        np.testing.assert_allclose([token.logprob for token in told], sequence.logprobs, atol=1e-6, rtol=0)
        assert sequence.topk is not None
        assert [[t for t, _ in token.topk] for token in told] == sequence.topk.token_ids.tolist()
