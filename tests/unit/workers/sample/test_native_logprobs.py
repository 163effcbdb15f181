"""Logprobs of sampled tokens and of prompts equal a full recomputation with merged weights, to 1e-4 in float32."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from app.wire.types import NO_TOKEN_LOGPROB
from tests.unit.workers.sample.native_lab import VOCAB, Lab, ask, prompt, serve
from workers.model.lora import Adapter


def next_logprobs(lab: Lab, tokens: list[int], adapter: Adapter | None) -> np.ndarray:
    """Of tokens 1 … of `tokens`, each given the ones before."""
    table = lab.logprobs(tokens, adapter)
    return table[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:], dtype=torch.long)].numpy()


def test_base_and_adapters_of_different_ranks_in_one_batch(any_lab: Lab) -> None:
    adapters = [None, any_lab.adapter(4, 1), any_lab.adapter(9, 2, unembed=False), any_lab.adapter(1, 3)]
    cases = {
        str(i): (ask(str(i), prompt(2 + 3 * i), max_tokens=3 + i % 5, seed=i, num_samples=1 + i % 3), adapters[i % 4])
        for i in range(12)
    }
    got = serve(any_lab.engine(), cases.values())
    for name, (request, adapter) in cases.items():
        for sequence in got[name].sequences:
            tokens = [*request.prompt, *sequence.tokens.tolist()]
            expected = next_logprobs(any_lab, tokens, adapter)[len(request.prompt) - 1 :]
            np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)
            assert sequence.logprobs.dtype == np.float32
            assert sequence.tokens.dtype == np.int32


@pytest.mark.parametrize("prefill_tokens", [4096, 7])
def test_prompt_logprobs_and_topk(any_lab: Lab, prefill_tokens: int) -> None:
    adapter = any_lab.adapter(4, 5)
    prompts = {str(n): (prompt(n), who) for n in (1, 2, 13, 40) for who in [adapter if n > 2 else None]}
    requests = [
        (ask(name, tokens, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=4), who)
        for name, (tokens, who) in prompts.items()
    ]
    got = serve(any_lab.engine(prefill_tokens=prefill_tokens), requests)
    for name, (tokens, who) in prompts.items():
        result = got[name]
        assert result.prompt_logprobs is not None
        assert result.topk_prompt_logprobs is not None
        assert np.isnan(result.prompt_logprobs[0])
        np.testing.assert_allclose(result.prompt_logprobs[1:], next_logprobs(any_lab, tokens, who), atol=1e-4)
        topk = result.topk_prompt_logprobs
        assert topk.token_ids.shape == topk.logprobs.shape == (len(tokens), 4)
        assert (topk.token_ids[0] == 0).all()
        assert (topk.logprobs[0] == np.float32(NO_TOKEN_LOGPROB)).all()
        best = any_lab.logprobs(tokens, who).topk(4, dim=-1)
        np.testing.assert_allclose(topk.logprobs[1:], best.values[:-1], atol=1e-4)
        np.testing.assert_array_equal(topk.token_ids[1:], best.indices[:-1])


def test_one_prompt_scored_differently_for_several_requests(lab: Lab) -> None:
    tokens = prompt(9)
    requests = [
        ask("plain", tokens, max_tokens=2),
        ask("all", tokens, max_tokens=2, prompt_logprobs=True),
        ask("top", tokens, max_tokens=2, topk_prompt_logprobs=3),
        ask("last", tokens, max_tokens=2, prompt_logprobs=True, prompt_logprobs_last_n=2),
    ]
    got = serve(lab.engine(), requests)
    expected = next_logprobs(lab, tokens, None)
    assert got["plain"].prompt_logprobs is None
    assert got["plain"].topk_prompt_logprobs is None
    assert got["all"].topk_prompt_logprobs is None
    assert got["top"].prompt_logprobs is None
    all_of_them, last = got["all"].prompt_logprobs, got["last"].prompt_logprobs
    assert all_of_them is not None
    assert last is not None
    np.testing.assert_allclose(all_of_them[1:], expected, atol=1e-4)
    assert np.isnan(last[:7]).all()
    np.testing.assert_allclose(last[7:], expected[6:], atol=1e-4)
    assert [got[name].prompt_cache_hit_tokens for name in ("plain", "all", "top", "last")] == [0, 9, 9, 9]


def test_scores_in_chunks_equal_scores_at_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        (ask(str(n), prompt(n), max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=2), who)
        for n, who in ((11, lab.adapter(2, 1)), (12, None), (9, lab.adapter(3, 2)))
    ]
    whole = serve(lab.engine(), requests)
    monkeypatch.setattr("workers.sample.engines.scores.MAX_LOGITS", 5 * VOCAB)
    parts = serve(lab.engine(), requests)
    for name, result in whole.items():
        np.testing.assert_allclose(parts[name].prompt_logprobs, result.prompt_logprobs, atol=1e-5)
        assert parts[name].topk_prompt_logprobs is not None
        assert result.topk_prompt_logprobs is not None
        np.testing.assert_array_equal(parts[name].topk_prompt_logprobs.token_ids, result.topk_prompt_logprobs.token_ids)
