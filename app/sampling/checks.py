"""What a sample may ask for: everything that can be decided from its model's row, before it is stored (WIRE §5.5)."""

from __future__ import annotations

import numpy as np

from app.errors import InvalidRequest
from app.fleet.service import ServedModel
from app.sampling.schemas import Params, Sample, TokenMatrix
from app.wire.types import PromptTargets, SampleRequest, SamplingParams

MAX_PROMPT_CELLS = 1 << 22
"""Largest number of logprobs that a sample may ask for about its prompt, of each kind: prompt tokens times their top k
or draws, or the cells of its targets."""
MAX_SAMPLED_CELLS = 1 << 24
"""Largest number of top-k logprobs of sampled tokens: sequences times tokens times k."""
MAX_STOP_STRINGS = 256
"""Each is looked for after every token of every sequence, while all others wait."""
MAX_STOP_CHARACTERS = 1024


def checked(body: Sample, request_id: str, model: ServedModel) -> SampleRequest:
    """The internal form of a sample that `model` can take. Raises InvalidRequest, naming the field."""
    prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
    if not prompt:
        raise InvalidRequest("prompt: has no tokens")
    if max(prompt) >= model.vocab_size:
        raise InvalidRequest(f"prompt: token {max(prompt)} is outside the vocabulary of {model.vocab_size}")
    if len(prompt) >= model.context_length:
        raise InvalidRequest(f"prompt: {len(prompt)} tokens leave no room in the context of {model.context_length}")
    for field in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(body, field) > model.vocab_size:
            raise InvalidRequest(f"{field}: exceeds the vocabulary of {model.vocab_size}")
    for field in ("topk_prompt_logprobs", "prompt_alt_tokens_k"):
        if len(prompt) * getattr(body, field) > MAX_PROMPT_CELLS:
            raise InvalidRequest(f"{field}: at most {MAX_PROMPT_CELLS // len(prompt)} for {len(prompt)} prompt tokens")
    _check_last_n(body, len(prompt))
    _check_sampled_cells(body, model.context_length - len(prompt))
    return SampleRequest(
        request_id=request_id,
        prompt=prompt,
        params=_params(body.sampling_params, model),
        num_samples=body.num_samples,
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        topk_sample_logprobs=body.topk_sample_logprobs,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        target_prompt_logprobs=_targets(body.target_prompt_logprobs, len(prompt), model),
        prompt_alt_tokens_k=body.prompt_alt_tokens_k,
        record=bool(body.record_stability_info),
    )


def _check_last_n(body: Sample, prompt_tokens: int) -> None:
    last_n = body.prompt_logprobs_last_n
    if last_n is None:
        return
    if not body.prompt_logprobs:
        raise InvalidRequest("prompt_logprobs_last_n: needs prompt_logprobs")
    if last_n > prompt_tokens - 1:
        raise InvalidRequest(f"prompt_logprobs_last_n: only {prompt_tokens - 1} tokens of the prompt have a logprob")


def _check_sampled_cells(body: Sample, room: int) -> None:
    wanted = body.sampling_params.max_tokens
    tokens = body.num_samples * (room if wanted is None else min(wanted, room))
    if tokens * body.topk_sample_logprobs > MAX_SAMPLED_CELLS:
        least = MAX_SAMPLED_CELLS // tokens
        raise InvalidRequest(
            f"topk_sample_logprobs: at most {least} for num_samples times max_tokens, which are {tokens} tokens"
        )


def _targets(matrix: TokenMatrix | None, prompt_tokens: int, model: ServedModel) -> PromptTargets | None:
    if matrix is None:
        return None
    name = "target_prompt_logprobs"
    rows, columns = matrix.shape
    if rows != prompt_tokens - 1:
        wanted = f"[{prompt_tokens - 1}, K], a row for every prompt token but the first"
        raise InvalidRequest(f"{name}.shape: {matrix.shape} must be {wanted}")
    if len(matrix.data) > MAX_PROMPT_CELLS:
        raise InvalidRequest(f"{name}.data: more than {MAX_PROMPT_CELLS} values")
    highest = max(matrix.data, default=-1)
    if highest >= model.vocab_size:
        raise InvalidRequest(f"{name}.data: token {highest} is outside the vocabulary of {model.vocab_size}")
    crow, col = matrix.sparse_crow_indices, matrix.sparse_col_indices
    if (crow is None) != (col is None):
        raise InvalidRequest(f"{name}: sparse_crow_indices and sparse_col_indices come together or not at all")
    if crow is None or col is None:
        if len(matrix.data) != rows * columns:
            raise InvalidRequest(f"{name}.data: {len(matrix.data)} values do not fill the shape {matrix.shape}")
    else:
        _check_csr(crow, col, matrix)
    if highest < 0:
        raise InvalidRequest(f"{name}.data: names no token")
    return PromptTargets((rows, columns), matrix.data, crow, col)


def _check_csr(crow: list[int], col: list[int], matrix: TokenMatrix) -> None:
    name = "target_prompt_logprobs"
    rows, columns = matrix.shape
    starts, places = np.asarray(crow, np.int64), np.asarray(col, np.int64)
    if len(col) != len(matrix.data):
        raise InvalidRequest(f"{name}.sparse_col_indices: {len(col)} for {len(matrix.data)} values")
    if len(crow) != rows + 1 or crow[0] != 0 or crow[-1] != len(col) or (np.diff(starts) < 0).any():
        raise InvalidRequest(f"{name}.sparse_crow_indices: they do not divide {len(col)} values among {rows} rows")
    if len(places) and places.max() >= columns:
        raise InvalidRequest(f"{name}.sparse_col_indices: {places.max()} is outside the shape {matrix.shape}")
    order = np.repeat(np.arange(rows), np.diff(starts)) * columns + places
    if (np.diff(order) <= 0).any():
        raise InvalidRequest(f"{name}.sparse_col_indices: they must ascend within each row")


def _params(params: Params, model: ServedModel) -> SamplingParams:
    tokens, strings = _stops(params.stop, model)
    return SamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        stop_tokens=tokens,
        stop_strings=strings,
    )


def _stops(
    stop: str | list[str] | list[int] | None, model: ServedModel
) -> tuple[tuple[int, ...] | None, tuple[str, ...] | None]:
    if stop is None:
        return None, None
    if isinstance(stop, str):
        stop = [stop]
    tokens = tuple(item for item in stop if isinstance(item, int))
    strings = tuple(item for item in stop if isinstance(item, str))
    if any(not text for text in strings):
        raise InvalidRequest("sampling_params.stop: a stop string must not be empty")
    if len(strings) > MAX_STOP_STRINGS or any(len(text) > MAX_STOP_CHARACTERS for text in strings):
        limits = f"{MAX_STOP_STRINGS} stop strings of {MAX_STOP_CHARACTERS} characters"
        raise InvalidRequest(f"sampling_params.stop: at most {limits} are possible")
    if any(not 0 <= token < model.vocab_size for token in tokens):
        raise InvalidRequest(f"sampling_params.stop: a token is outside the vocabulary of {model.vocab_size}")
    return tokens, strings
