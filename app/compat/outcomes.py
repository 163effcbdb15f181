"""What a sampler answers, as the OpenAI-compatible routes use it: tokens with their scores, not yet text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from app.wire import tinker_pb2 as pb
from app.wire.types import NO_TOKEN_LOGPROB

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Score:
    """A token, its logprob (None: the first of a prompt has none), and the most probable tokens at its place."""

    token: int
    logprob: float | None
    topk: Sequence[tuple[int, float]] = ()


@dataclass(frozen=True, slots=True)
class SequenceOutcome:
    """One sampled continuation."""

    scores: list[Score]
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished sample. `prompt`: the scores of its tokens, if they were asked for."""

    sequences: list[SequenceOutcome]
    prompt: list[Score]
    cached_tokens: int


def read_response(payload: bytes, prompt: Sequence[int]) -> Outcome:
    """A sample's `SampleResponse` (WIRE §4.3)."""
    message = pb.SampleResponse.FromString(payload)
    return Outcome(
        [_sequence(sequence) for sequence in message.sequences],
        _prompt(message, prompt),
        message.prompt_cache_hit_tokens,
    )


def _sequence(message: pb.SampledSequence) -> SequenceOutcome:
    tokens = np.frombuffer(message.tokens, "<i4").tolist()
    logprobs = np.frombuffer(message.logprobs, "<f4").tolist()
    topk = _topk(message.topk_sampled_logprobs) if message.HasField("topk_sampled_logprobs") else [()] * len(tokens)
    scores = [Score(*score) for score in zip(tokens, logprobs, topk, strict=True)]
    return SequenceOutcome(scores, "stop" if message.stop_reason == pb.STOP_REASON_STOP else "length")


def _prompt(message: pb.SampleResponse, prompt: Sequence[int]) -> list[Score]:
    if not message.prompt_logprobs:
        return []
    logprobs = np.frombuffer(message.prompt_logprobs, "<f4")
    topk = _topk(message.topk_prompt_logprobs) if message.HasField("topk_prompt_logprobs") else [()] * len(prompt)
    return [
        Score(token, None if np.isnan(logprob) else float(logprob), most_probable)
        for token, logprob, most_probable in zip(prompt, logprobs, topk, strict=True)
    ]


def _topk(message: pb.TopkLogprobs) -> list[Sequence[tuple[int, float]]]:
    shape = message.length, message.k
    ids = np.frombuffer(message.token_ids, "<i4").reshape(shape).tolist()
    logprobs = np.frombuffer(message.logprobs, "<f4").reshape(shape).tolist()
    return [
        [cell for cell in zip(row, values, strict=True) if cell[1] != NO_TOKEN_LOGPROB]
        for row, values in zip(ids, logprobs, strict=True)
    ]
