"""vLLM's answers in the form that tickets take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from app.wire.types import SampleRequest, SampleResult, TopK
from workers.sample.engines.scores import PromptScores, Scored
from workers.sample.engines.tickets import Sequence
from workers.sample.engines.vllm_questions import Questions


def accept(sequence: Sequence, output: Any) -> str | None:
    """Give a sequence the tokens of a `CompletionOutput`; the stop reason if one of them was its last, after which the
    others count for nothing. Raises `EngineFailure` if the model returned NaN."""
    flat, k = output.logprobs, sequence.ticket.request.topk_sample_logprobs
    on_token = sequence.ticket.job.on_token
    for token, start, end in zip(output.token_ids, flat.start_indices, flat.end_indices, strict=True):
        if k:
            best = slice(start + 1, min(end, start + 1 + k))
            sequence.topk.append((np.array(flat.token_ids[best], np.int32), np.array(flat.logprobs[best], np.float32)))
        reason = sequence.accept(token, flat.logprobs[start])
        if on_token is not None:
            on_token(sequence.newest)
        if reason is not None:
            return reason
    return None


class PromptAnswers:
    """The answers to a request's questions about its prompt.

    `ids` int32 and `logprobs` float32 [P-1, 1+C]: in each row the token at that position, then what was asked for.
    """

    def __init__(self, questions: Questions, flat: Any) -> None:
        """`flat`: vLLM's `FlatLogprobs`, whose first position is empty."""
        self._questions = questions
        shape = (len(flat.start_indices) - 1, 1 + questions.columns)
        self.ids = np.array(flat.token_ids, np.int32).reshape(shape)
        self.logprobs = np.array(flat.logprobs, np.float32).reshape(shape)

    def fill(self, scores: PromptScores) -> None:
        """Give the prompt's own logprobs and the most probable tokens to where results are made from."""
        best = slice(1, 1 + self._questions.k)
        scores.fill(1, Scored(self.logprobs[:, 0], TopK(self.ids[:, best], self.logprobs[:, best])))

    def complete(self, result: SampleResult, request: SampleRequest) -> SampleResult:
        """The result with named and drawn tokens."""
        named = request.target_prompt_logprobs
        return replace(
            result,
            target_prompt_logprobs=None if named is None else self._questions.named(named, self.logprobs),
            prompt_alt_tokens=(
                self._questions.alternatives(self.ids, self.logprobs) if request.prompt_alt_tokens_k else None
            ),
        )
