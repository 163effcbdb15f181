"""What a vLLM server is asked for one sequence, and how its answer is read (`/v1/completions`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from app.errors import InvalidRequest
from app.wire.types import NO_TOKEN_LOGPROB, SampleRequest, TopK
from workers.sample.engines.base import EngineFailure
from workers.sample.engines.draw import GREEDY_BELOW, stream
from workers.sample.engines.scores import PromptScores, Scored
from workers.sample.engines.tickets import Sequence, Ticket

WARMEST, COLDEST = 2.0, 0.01
"""Temperatures that the server takes as they are."""
LEAST_TOP_P = 1e-9


def refuse(request: SampleRequest, *, trains_unembedding: bool) -> None:
    """Raises InvalidRequest, naming the field, for what the server's routes cannot tell, or tell wrongly."""
    for name, wanted in (
        ("target_prompt_logprobs", request.target_prompt_logprobs is not None),
        ("prompt_alt_tokens_k", request.prompt_alt_tokens_k > 0),
    ):
        if wanted:
            raise InvalidRequest(f"{name}: the external sampling engine cannot answer it")
    asks = request.prompt_logprobs or request.topk_prompt_logprobs > 0
    if asks and trains_unembedding:
        name = "prompt_logprobs" if request.prompt_logprobs else "topk_prompt_logprobs"
        raise InvalidRequest(f"{name}: the external sampling engine has them wrong for adapters with train_unembed")
    temperature = request.params.temperature
    if temperature > WARMEST or GREEDY_BELOW <= temperature < COLDEST:
        raise InvalidRequest(
            f"sampling_params.temperature: the external sampling engine takes 0 and from {COLDEST} to {WARMEST}"
        )


def completion_body(ticket: Ticket, index: int, *, model: str, vocab_size: int) -> dict[str, Any]:
    """The body of a request for sequence `index`. What is asked about the prompt goes with the first."""
    request, params = ticket.request, ticket.request.params
    greedy = params.temperature < GREEDY_BELOW
    body: dict[str, Any] = {
        "model": model,
        "prompt": ticket.prompt.tolist(),
        "max_tokens": ticket.limit,
        "temperature": 0.0 if greedy else params.temperature,
        "top_p": 1.0 if greedy else min(1.0, max(LEAST_TOP_P, params.top_p)),
        "top_k": params.top_k if 0 < params.top_k < vocab_size and not greedy else 0,
        "logprobs": min(request.topk_sample_logprobs, vocab_size),
        "ignore_eos": True,
        "stop": list(ticket.stops.strings),
        "stop_token_ids": [token for token in ticket.stops.tokens if 0 <= token < vocab_size],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "add_special_tokens": False,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if params.seed is not None:
        body["seed"] = stream(params.seed, index) >> 1
    if index == 0 and ticket.scores is not None and len(ticket.prompt) > 1:
        body["prompt_logprobs"] = min(request.topk_prompt_logprobs, vocab_size)
    return body


def take_completion(sequence: Sequence, answer: dict[str, Any]) -> str:
    """Give a sequence its tokens, and its job what was asked about the prompt; returns the stop reason.

    Raises EngineFailure if the server returned NaN or too little, KeyError and the like for what is no completion.
    """
    ticket, [choice] = sequence.ticket, answer["choices"]
    if sequence.index == 0:
        details = answer["usage"].get("prompt_tokens_details") or {}
        ticket.cache_hit_tokens = details.get("cached_tokens") or 0
        if ticket.scores is not None and len(ticket.prompt) > 1:
            fill(ticket.scores, ticket.prompt, choice["prompt_logprobs"])
    k = ticket.request.topk_sample_logprobs
    logprobs = choice["logprobs"]
    for i, token in enumerate(choice["token_ids"]):
        if k:
            sequence.topk.append(ranked(named(logprobs["top_logprobs"][i]), k))
        logprob = logprobs["token_logprobs"][i]
        reason = sequence.accept(token, math.nan if logprob is None else logprob)
        if ticket.job.on_token is not None:
            ticket.job.on_token(sequence.newest)
        if reason is not None:
            return reason
    if choice["finish_reason"] == "stop" and sequence.tokens:
        return "stop"
    raise EngineFailure("the vLLM server has ended a sequence early")


def fill(scores: PromptScores, prompt: np.ndarray, positions: list[dict[str, dict[str, Any]] | None]) -> None:
    """Take the logprobs of a prompt: at each position but the first, those of its token and of the most probable."""
    rows, k = len(prompt) - 1, scores.k
    own = np.zeros(rows, np.float32)
    ids, logprobs = np.zeros((rows, k), np.int32), np.full((rows, k), NO_TOKEN_LOGPROB, np.float32)
    for row, told in enumerate(positions[1:]):
        table = {int(token): float(entry["logprob"]) for token, entry in (told or {}).items()}
        own[row] = table[int(prompt[row + 1])]
        best = ranked(table, k)
        ids[row, : len(best[0])], logprobs[row, : len(best[1])] = best
    scores.fill(1, Scored(own, TopK(ids, logprobs) if k else None))


def named(told: dict[str, float]) -> dict[int, float]:
    """`token_id:7` → 7."""
    return {int(name.partition(":")[2]): logprob for name, logprob in told.items()}


def ranked(table: dict[int, float], k: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and logprobs of at most k tokens, most probable first."""
    best = sorted(table.items(), key=lambda item: -item[1])[:k]
    return np.array([token for token, _ in best], np.int32), np.array([logprob for _, logprob in best], np.float32)
