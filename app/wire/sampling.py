"""Samples between their forms: the stored request (JSON in Redis), the dataclass, the protobuf result (WIRE §4.3)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import orjson

from app.wire import tinker_pb2 as pb
from app.wire.types import (
    AltTokens,
    PromptTargets,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplingParams,
    TargetLogprobs,
    TopK,
)

SAMPLE_FORMAT = 2
"""Version of the stored form; a sampler leaves requests of a newer one to others. 1 lacks the request's last fields."""


class NewerSample(ValueError):
    """A newer release has stored the sample, in a form that this one cannot read: it is left to its samplers."""


@dataclass(frozen=True, slots=True)
class StoredSample:
    """A sample request as it waits in Redis. `snapshot_id` None means the base model; `base_model` is what the client
    calls it, for its bill. `session_id` is empty where there is no session. `stream`: its tokens are told as they are
    drawn."""

    owner_id: str
    session_id: str
    pool: str
    snapshot_id: str | None
    request: SampleRequest
    base_model: str = ""
    stream: bool = False


def encode_stored(sample: StoredSample) -> bytes:
    """JSON bytes of a stored request."""
    return orjson.dumps({"format": SAMPLE_FORMAT} | {f.name: getattr(sample, f.name) for f in fields(sample)})


def decode_stored(raw: bytes) -> StoredSample:
    """The inverse of `encode_stored`. Raises NewerSample for a format that this release does not know."""
    data: dict[str, Any] = orjson.loads(raw)
    if data.pop("format") > SAMPLE_FORMAT:
        raise NewerSample("the sample was stored by a newer release")
    request = data.pop("request")
    params = request.pop("params")
    for name in ("stop_tokens", "stop_strings"):
        if params[name] is not None:
            params[name] = tuple(params[name])
    if (targets := request.get("target_prompt_logprobs")) is not None:
        request["target_prompt_logprobs"] = PromptTargets(**targets | {"shape": tuple(targets["shape"])})
    return StoredSample(request=SampleRequest(params=SamplingParams(**params), **request), **data)


def encode_result(result: SampleResult) -> bytes:
    """The protobuf `SampleResponse`."""
    message = pb.SampleResponse(prompt_cache_hit_tokens=result.prompt_cache_hit_tokens)
    for sequence in result.sequences:
        message.sequences.append(_sequence(sequence))
    if result.prompt_logprobs is not None:
        message.prompt_logprobs = np.ascontiguousarray(result.prompt_logprobs, "<f4").tobytes()
    if result.topk_prompt_logprobs is not None:
        message.topk_prompt_logprobs.CopyFrom(_topk(result.topk_prompt_logprobs))
    if result.target_prompt_logprobs is not None:
        message.target_prompt_logprobs.CopyFrom(_targets(result.target_prompt_logprobs))
    if result.prompt_alt_tokens is not None:
        message.prompt_alt_tokens.CopyFrom(_alternatives(result.prompt_alt_tokens))
    payload: bytes = message.SerializeToString()
    return payload


def _sequence(sequence: SampledSequence) -> pb.SampledSequence:
    message = pb.SampledSequence(
        stop_reason=pb.STOP_REASON_STOP if sequence.stop_reason == "stop" else pb.STOP_REASON_LENGTH,
        tokens=np.ascontiguousarray(sequence.tokens, "<i4").tobytes(),
        logprobs=np.ascontiguousarray(sequence.logprobs, "<f4").tobytes(),
    )
    if sequence.topk is not None:
        message.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk))
    return message


def _targets(scored: TargetLogprobs) -> pb.Tensor:
    targets = scored.targets
    tensor = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=targets.shape)
    values = np.ascontiguousarray(scored.logprobs, "<f4").tobytes()
    if targets.rows is None:
        tensor.dense = values
    else:
        tensor.sparse_csr.values = values
        tensor.sparse_csr.crow_indices = np.asarray(targets.rows, "<i8").tobytes()
        tensor.sparse_csr.col_indices = np.asarray(targets.columns, "<i8").tobytes()
    return tensor


def _alternatives(drawn: AltTokens) -> pb.PromptAltTokens:
    tokens = pb.Tensor(dtype=pb.DTYPE_INT64, shape=drawn.tokens.shape)
    tokens.dense = np.ascontiguousarray(drawn.tokens, "<i8").tobytes()
    logprobs = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=drawn.logprobs.shape)
    logprobs.dense = np.ascontiguousarray(drawn.logprobs, "<f4").tobytes()
    return pb.PromptAltTokens(tokens=tokens, logprobs=logprobs)


def _topk(topk: TopK) -> pb.TopkLogprobs:
    length, k = topk.token_ids.shape
    return pb.TopkLogprobs(
        token_ids=np.ascontiguousarray(topk.token_ids, "<i4").tobytes(),
        logprobs=np.ascontiguousarray(topk.logprobs, "<f4").tobytes(),
        k=k,
        length=length,
    )
