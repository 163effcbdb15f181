"""Named tokens are scored, and alternatives drawn, at every position of a prompt, as a full recomputation with merged
weights has it: in float32 to 1e-4, whatever the batch and however the prompt is cut."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from app.wire.types import PromptTargets, SampleResult
from tests.engine_suite.distribution import assert_follows
from tests.engine_suite.targets import dense, expected_targets, sparse
from tests.unit.workers.sample.native_lab import VOCAB, Lab, ask, prompt, sample, serve


def target_logprobs(result: SampleResult) -> np.ndarray:
    assert result.target_prompt_logprobs is not None
    return result.target_prompt_logprobs.logprobs


@pytest.mark.parametrize("prefill_tokens", [4096, 7])
def test_named_tokens_are_scored_beside_other_requests(any_lab: Lab, prefill_tokens: int) -> None:
    adapters = [None, any_lab.adapter(4, 5), any_lab.adapter(2, 6, unembed=False)]
    cases = {}
    for number, length in enumerate((2, 5, 13, 40)):
        matrix = dense(length, 1 + number, number, VOCAB)
        tokens, who = prompt(length), adapters[number % 3]
        cases[f"dense {length}"] = ask(f"dense {length}", tokens, max_tokens=1, targets=matrix), who
        cases[f"sparse {length}"] = ask(f"sparse {length}", tokens, max_tokens=3, targets=sparse(matrix)), who
        cases[f"own {length}"] = ask(f"own {length}", prompt(length, 1), max_tokens=2, prompt_logprobs=True), who
    got = serve(any_lab.engine(prefill_tokens=prefill_tokens), cases.values())
    for name, (request, who) in cases.items():
        targets = request.target_prompt_logprobs
        if targets is None:
            assert got[name].target_prompt_logprobs is None
            continue
        logprobs = target_logprobs(got[name])
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(
            logprobs, expected_targets(any_lab.logprobs(list(request.prompt), who), targets), atol=1e-4
        )
        assert (logprobs[np.array(targets.tokens) < 0] == 0).all()


def test_one_prompt_asked_in_many_ways(lab: Lab) -> None:
    tokens, matrix = prompt(12), dense(12, 2, 0, VOCAB)
    late = PromptTargets((11, 1), [-1] * 9 + [4, 5])
    requests = [
        ask("plain", tokens, max_tokens=1),
        ask("all", tokens, max_tokens=1, targets=matrix, prompt_logprobs=True, topk_prompt_logprobs=2, alternatives=3),
        ask("last", tokens, max_tokens=1, targets=matrix, prompt_logprobs=True, prompt_logprobs_last_n=2),
        ask("late", tokens, max_tokens=1, targets=late),
        ask("drawn", tokens, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=2, alternatives=2),
    ]
    got = serve(lab.engine(), requests)
    expected = expected_targets(lab.logprobs(tokens), matrix)
    for name in ("all", "last"):
        np.testing.assert_allclose(target_logprobs(got[name]), expected, atol=1e-4)
    np.testing.assert_allclose(target_logprobs(got["late"]), expected_targets(lab.logprobs(tokens), late), atol=1e-4)
    own = got["last"].prompt_logprobs
    assert own is not None
    assert np.isnan(own).tolist() == [True] * 10 + [False] * 2
    drawn = got["drawn"].prompt_alt_tokens
    assert drawn is not None
    assert drawn.tokens.shape == (11, 2)
    assert (drawn.logprobs < 0).all()
    assert got["late"].prompt_logprobs is None
    assert got["plain"].target_prompt_logprobs is None
    assert got["plain"].prompt_alt_tokens is None


def test_chunks_of_logits_change_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        (ask(str(n), prompt(n), max_tokens=1, seed=n, targets=dense(n, 3, 1, VOCAB), alternatives=4), who)
        for n, who in ((11, lab.adapter(2, 1)), (2, None), (12, None), (9, lab.adapter(3, 2)))
    ]
    whole = serve(lab.engine(), requests)
    monkeypatch.setattr("workers.sample.engines.scores.MAX_LOGITS", 5 * VOCAB)
    parts = serve(lab.engine(), requests)
    for name, result in whole.items():
        np.testing.assert_allclose(target_logprobs(parts[name]), target_logprobs(result), atol=1e-5)
        assert result.prompt_alt_tokens is not None
        assert parts[name].prompt_alt_tokens is not None
        np.testing.assert_array_equal(parts[name].prompt_alt_tokens.tokens, result.prompt_alt_tokens.tokens)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_alternatives_of_a_prompt_in_pieces_follow_the_tempered_distribution(lab: Lab, temperature: float) -> None:
    """Of the whole vocabulary: top-k and top-p are for what is sampled."""
    adapter, tokens, k = lab.adapter(4, 2), prompt(6), 4000
    params = {"temperature": temperature, "seed": 11, "top_k": 3, "top_p": 0.5}
    request = ask("r", tokens, max_tokens=1, alternatives=k, **params)
    drawn = sample(lab.engine(prefill_tokens=3), request, adapter).prompt_alt_tokens
    assert drawn is not None
    assert drawn.tokens.shape == drawn.logprobs.shape == (5, k)
    assert (drawn.tokens.dtype, drawn.logprobs.dtype) == (np.int64, np.float32)
    table = lab.logprobs(tokens, adapter)
    for row in range(5):
        np.testing.assert_allclose(drawn.logprobs[row], table[row].numpy()[drawn.tokens[row]], atol=1e-4)
        assert_follows(drawn.tokens[row], torch.softmax(table[row] / temperature, -1).numpy())


def test_draws_of_a_position_and_of_positions_are_independent(lab: Lab) -> None:
    """A pair of equal distributions, drawn from twice: how often both draws agree is what independence has it."""
    tokens, k = [5] * 2, 20_000
    drawn = sample(lab.engine(), ask("r", [*tokens, 5], max_tokens=1, seed=3, alternatives=k)).prompt_alt_tokens
    assert drawn is not None
    probs = lab.logprobs([5, 5])[:2].exp().numpy()
    pairs = [(drawn.tokens[0, ::2], drawn.tokens[0, 1::2], probs[0], probs[0])]
    pairs += [(drawn.tokens[0], drawn.tokens[1], probs[0], probs[1])]
    for first, second, p, q in pairs:
        agree = float((p * q).sum())
        deviation = math.sqrt(agree * (1 - agree) / len(first))
        assert abs(float((first == second).mean()) - agree) < 5 * deviation


def test_a_seed_repeats_the_draws_however_the_prompt_is_cut(lab: Lab) -> None:
    def draws(engine_options: dict[str, int], **params: int) -> np.ndarray:
        company = [ask("other", prompt(9, 4), max_tokens=1, seed=8, alternatives=8)]
        request = ask("r", prompt(10), max_tokens=1, alternatives=8, **params)
        found = serve(lab.engine(**engine_options), [*company, request])["r"].prompt_alt_tokens
        assert found is not None
        return found.tokens

    np.testing.assert_array_equal(draws({}, seed=1), draws({"prefill_tokens": 4}, seed=1))


def test_draws_differ_from_what_is_sampled_with_the_same_seed(lab: Lab) -> None:
    """The first sample at position 1 and the first draw there have different random numbers."""
    pairs = []
    for seed in range(20):
        drawn = sample(lab.engine(), ask("d", [3, 4], max_tokens=1, seed=seed, alternatives=1)).prompt_alt_tokens
        assert drawn is not None
        sampled = sample(lab.engine(), ask("s", [3], max_tokens=1, seed=seed)).sequences[0]
        pairs.append((int(drawn.tokens[0, 0]), int(sampled.tokens[0])))
    assert any(drawn != sampled for drawn, sampled in pairs)


def test_many_samples_that_enter_in_parts_have_one_answer_about_the_prompt(lab: Lab) -> None:
    tokens, matrix = prompt(8), dense(8, 2, 3, VOCAB)
    request = ask("r", tokens, max_tokens=3, num_samples=7, targets=matrix, alternatives=2)
    result = sample(lab.engine(max_rows=3), request)
    assert len(result.sequences) == 7
    np.testing.assert_allclose(target_logprobs(result), expected_targets(lab.logprobs(tokens), matrix), atol=1e-4)
