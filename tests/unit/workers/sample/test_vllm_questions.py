"""Questions about a prompt survive the way to vLLM's process, and their answers the way back."""

from __future__ import annotations

import ast
from dataclasses import replace

import numpy as np
import pytest
import torch

from app.wire.types import PromptTargets, SampleRequest, SamplingParams
from workers.sample.engines.probes import AltProbe, TargetProbe
from workers.sample.engines.vllm_questions import Questions

VOCAB, LENGTH = 50, 9
PROMPT = list(range(LENGTH))
PLAIN = SampleRequest("r", PROMPT, SamplingParams(seed=3, temperature=0.7))
DENSE = PromptTargets((LENGTH - 1, 2), [-1, 4, 5, 6, -1, -1, 7, 7, *[1, 2] * 4])
SPARSE = PromptTargets((LENGTH - 1, 40), [9, 8, -1, 3], [0, 0, 2, 2, 2, 4, 4, 4, 4], [3, 39, 0, 20])


def table() -> torch.Tensor:
    """Logprobs at positions 1 … of the prompt."""
    logits = np.random.default_rng(1).normal(size=(LENGTH - 1, VOCAB))
    return torch.log_softmax(torch.from_numpy(logits).float(), -1)


def answered(request: SampleRequest) -> tuple[Questions, np.ndarray, np.ndarray]:
    """Questions, and what comes back: ids and logprobs [P-1, 1+C], computed in two passes."""
    questions = Questions.of(request, VOCAB)
    assert questions is not None
    packed = questions.packed()
    assert packed is not None
    there = Questions.unpacked(ast.literal_eval(repr(packed)))  # of plain types
    parts = [there.answers(table()[:3], 1), there.answers(table()[3:], 4)]
    ids, logprobs = (torch.cat([part[i] for part in parts]).numpy() for i in (0, 1))
    front = np.zeros((LENGTH - 1, 1 + questions.k), np.int32)
    return questions, np.hstack([front, ids]), np.hstack([front.astype(np.float32), logprobs])


@pytest.mark.parametrize("targets", [DENSE, SPARSE])
@pytest.mark.parametrize("k", [0, 3])
def test_named_tokens_are_answered_as_by_the_native_engine(targets: PromptTargets, k: int) -> None:
    request = replace(PLAIN, target_prompt_logprobs=targets, topk_prompt_logprobs=k, prompt_alt_tokens_k=2)
    questions, _, logprobs = answered(request)
    probe = TargetProbe(targets)
    probe.see(1, table())
    found = questions.named(targets, logprobs)
    np.testing.assert_array_equal(found.logprobs, probe.result().logprobs)
    assert (found.targets, found.logprobs.dtype) == (targets, np.float32)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_drawn_tokens_are_those_of_the_native_engine(temperature: float) -> None:
    params = SamplingParams(seed=3, temperature=temperature)
    request = replace(PLAIN, params=params, prompt_alt_tokens_k=4, target_prompt_logprobs=DENSE)
    questions, ids, logprobs = answered(request)
    probe = AltProbe(request)
    probe.see(1, table())
    drawn, expected = questions.alternatives(ids, logprobs), probe.result()
    np.testing.assert_array_equal(drawn.tokens, expected.tokens)
    np.testing.assert_array_equal(drawn.logprobs, expected.logprobs)


def test_what_vllm_tells_by_itself_needs_no_questions() -> None:
    assert Questions.of(PLAIN, VOCAB) is None
    own = Questions.of(replace(PLAIN, prompt_logprobs=True, topk_prompt_logprobs=5), VOCAB)
    assert own is not None
    assert (own.packed(), own.columns) == (None, 5)
    assert Questions.of(replace(PLAIN, prompt=[1], prompt_alt_tokens_k=3), VOCAB) is None


def test_targets_that_name_no_token_are_an_error() -> None:
    with pytest.raises(ValueError, match="names no token"):
        Questions.of(replace(PLAIN, target_prompt_logprobs=PromptTargets((8, 1), [-1] * 8)), VOCAB)
