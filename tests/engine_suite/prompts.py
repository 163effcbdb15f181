"""What a request asks about its prompt: logprobs of its tokens, the most probable ones, named ones, drawn ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.wire.types import NO_TOKEN_LOGPROB, SampleResult, TopK
from tests.engine_suite.distribution import assert_follows
from tests.engine_suite.models import prompt
from tests.engine_suite.rig import TOLERANCE, WHO, Asked, Rig, ask
from tests.engine_suite.targets import dense, expected_targets, sparse


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)


def own_logprobs(result: SampleResult) -> np.ndarray:
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs.dtype == np.float32
    return result.prompt_logprobs


def topk_of(result: SampleResult) -> TopK:
    topk = result.topk_prompt_logprobs
    assert topk is not None
    assert topk.token_ids.shape == topk.logprobs.shape
    assert (topk.token_ids.dtype, topk.logprobs.dtype) == (np.int32, np.float32)
    return topk


def assert_says_nothing(topk: TopK, rows: slice) -> None:
    assert (topk.token_ids[rows] == 0).all()
    assert (topk.logprobs[rows] == np.float32(NO_TOKEN_LOGPROB)).all()


def test_logprobs_and_top_k_of_prompts_of_many_lengths(rig: Rig) -> None:
    asked = {
        f"{n} {who}": Asked(
            ask(f"{n} {who}", prompt(n), max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=4), who
        )
        for n in (1, 2, 13, 100)
        for who in WHO
    }
    for name, result in rig.serve(asked.values()).items():
        tokens, who = asked[name].request.prompt, asked[name].who
        assert len(own_logprobs(result)) == len(tokens)
        assert np.isnan(own_logprobs(result)[0])
        assert_close(own_logprobs(result)[1:], rig.reference.next_logprobs(tokens, who))
        topk = topk_of(result)
        assert topk.token_ids.shape == (len(tokens), 4)
        assert_says_nothing(topk, slice(1))
        best = rig.reference.logprobs(tokens, who).topk(4, dim=-1)
        assert_close(topk.logprobs[1:], best.values[:-1])
        np.testing.assert_array_equal(topk.token_ids[1:], best.indices[:-1])


def test_of_a_prompt_that_was_read_before_the_logprobs_are_complete(rig: Rig) -> None:
    tokens = prompt(80, seed=9)
    rig.sample(ask("before", tokens, max_tokens=2))
    result = rig.sample(ask("after", tokens, max_tokens=1, prompt_logprobs=True))
    assert_close(own_logprobs(result)[1:], rig.reference.next_logprobs(tokens))
    assert 0 <= result.prompt_cache_hit_tokens <= len(tokens)


@pytest.mark.parametrize("last_n", [1, 3, 9])
def test_logprobs_of_the_last_n_only(rig: Rig, last_n: int) -> None:
    tokens = prompt(10)
    options = {"prompt_logprobs": True, "prompt_logprobs_last_n": last_n, "topk_prompt_logprobs": 2}
    result = rig.sample(ask("r", tokens, max_tokens=1, **options), "unembedding")  # type: ignore[arg-type]
    assert np.isnan(own_logprobs(result)).tolist() == [True] * (10 - last_n) + [False] * last_n
    expected = rig.reference.next_logprobs(tokens, "unembedding")
    assert_close(own_logprobs(result)[10 - last_n :], expected[9 - last_n :])
    assert_says_nothing(topk_of(result), slice(10 - last_n))
    assert (topk_of(result).logprobs[10 - last_n :] > NO_TOKEN_LOGPROB).all()


def test_nothing_is_told_that_was_not_asked_for(rig: Rig) -> None:
    tokens = prompt(9)
    got = rig.serve(
        [
            ask("plain", tokens, max_tokens=2),
            ask("own", tokens, max_tokens=2, prompt_logprobs=True),
            ask("top", tokens, max_tokens=2, topk_prompt_logprobs=3),
            ask("last", tokens, max_tokens=2, prompt_logprobs=True, prompt_logprobs_last_n=2),
        ]
    )
    told = {name: (r.prompt_logprobs is not None, r.topk_prompt_logprobs is not None) for name, r in got.items()}
    assert told == {"plain": (False, False), "own": (True, False), "top": (False, True), "last": (True, False)}
    for result in got.values():
        assert (result.target_prompt_logprobs, result.prompt_alt_tokens) == (None, None)
        assert result.sequences[0].topk is None


def target_logprobs(result: SampleResult) -> np.ndarray:
    assert result.target_prompt_logprobs is not None
    assert result.target_prompt_logprobs.logprobs.dtype == np.float32
    return result.target_prompt_logprobs.logprobs


def test_named_tokens_are_scored_beside_other_requests(rig: Rig) -> None:
    asked: dict[str, Asked] = {}
    for number, length in enumerate((2, 5, 13, 40)):
        matrix, tokens, who = dense(length, 1 + number, number), prompt(length), WHO[number]
        for name, targets in ((f"dense {length}", matrix), (f"sparse {length}", sparse(matrix))):
            asked[name] = Asked(ask(name, tokens, max_tokens=1 + number, targets=targets), who)
        asked[f"own {length}"] = Asked(ask(f"own {length}", tokens, max_tokens=2, prompt_logprobs=True), who)
    for name, result in rig.serve(asked.values()).items():
        request = asked[name].request
        targets = request.target_prompt_logprobs
        if targets is None:
            assert result.target_prompt_logprobs is None
            continue
        logprobs = target_logprobs(result)
        assert result.target_prompt_logprobs is not None
        assert result.target_prompt_logprobs.targets == targets
        assert_close(logprobs, expected_targets(rig.reference.logprobs(request.prompt, asked[name].who), targets))
        assert (logprobs[np.array(targets.tokens) < 0] == 0).all()


def test_a_prompt_asked_about_in_every_way_at_once(rig: Rig) -> None:
    tokens, who, matrix = prompt(12), "all layers", dense(12, 2, 0)
    options = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "targets": matrix, "alternatives": 3}
    asked = Asked(
        ask("r", tokens, max_tokens=3, num_samples=5, prompt_logprobs_last_n=2, seed=1, **options),  # type: ignore[arg-type]
        who,
    )
    result = rig.sample(asked.request, who)
    rig.check(asked, result)
    assert len(result.sequences) == 5
    table = rig.reference.logprobs(tokens, who)
    assert_close(own_logprobs(result)[10:], rig.reference.next_logprobs(tokens, who)[9:])
    assert_close(target_logprobs(result), expected_targets(table, matrix))
    drawn = result.prompt_alt_tokens
    assert drawn is not None
    assert_close(drawn.logprobs, np.take_along_axis(table[:-1].numpy(), drawn.tokens, 1))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_alternatives_follow_the_tempered_distribution(rig: Rig, temperature: float) -> None:
    """Of the whole vocabulary: top-k and top-p are for what is sampled (WIRE §5.5)."""
    tokens, k, who = prompt(4), 1500, "attention"
    params = {"temperature": temperature, "seed": 11, "top_k": 3, "top_p": 0.5}
    drawn = rig.sample(ask("r", tokens, max_tokens=1, alternatives=k, **params), who).prompt_alt_tokens
    assert drawn is not None
    assert drawn.tokens.shape == drawn.logprobs.shape == (3, k)
    assert (drawn.tokens.dtype, drawn.logprobs.dtype) == (np.int64, np.float32)
    table = rig.reference.logprobs(tokens, who)
    for row in range(3):
        assert_close(drawn.logprobs[row], table[row].numpy()[drawn.tokens[row]])
        assert_follows(drawn.tokens[row], torch.softmax(table[row] / temperature, -1).numpy())


def test_a_seed_repeats_the_alternatives_and_another_does_not(rig: Rig) -> None:
    def draws(**params: object) -> np.ndarray:
        company = ask("other", prompt(9, 4), max_tokens=1, seed=8, alternatives=8)
        request = ask("r", prompt(10), max_tokens=1, alternatives=8, **params)
        found = rig.serve([company, request])["r"].prompt_alt_tokens
        assert found is not None
        return found.tokens

    np.testing.assert_array_equal(draws(seed=1), draws(seed=1))
    assert (draws(seed=1) != draws(seed=2)).any()
    assert (draws() != draws()).any()
    np.testing.assert_array_equal(
        draws(temperature=0.0),
        np.repeat(rig.reference.logprobs(prompt(10))[:-1].argmax(-1).numpy()[:, None], 8, 1),
    )


def test_a_prompt_of_one_token_has_no_position_to_draw_at(rig: Rig) -> None:
    drawn = rig.sample(ask("r", [1], max_tokens=1, alternatives=3)).prompt_alt_tokens
    assert drawn is not None
    assert drawn.tokens.shape == drawn.logprobs.shape == (0, 3)
