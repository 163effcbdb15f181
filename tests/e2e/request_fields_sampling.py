"""What each field of the sampling requests, the saves and the polls does."""

from __future__ import annotations

from pyrage import x25519

from tests.e2e.field_checks import Check, decides, differs, inert, refused
from tests.e2e.field_probes_sampling import (
    SPARSE,
    cancel,
    forward_backward_in,
    join,
    retrieve,
    retrieve_as,
    retrieve_futures,
    sample,
    sampling_session,
    save_ephemeral,
    save_external,
    save_named_sampler,
    save_weights,
    scored,
    scored_sparsely,
)
from tests.e2e.field_world import ABSENT, PROTOBUF

RECIPIENT = str(x25519.Identity.generate().to_public())
T = "target_prompt_logprobs"
CHUNK = "prompt.chunks.0"
IMAGE = {"type": "image", "data": "AAAA", "format": "png", "expected_tokens": 4}
POINTER = {"type": "image_asset_pointer", "location": "x", "format": "png", "expected_tokens": 4}
DMEL = {"type": "dmel", "dmel": "AAAA"}

SAMPLES: tuple[Check, ...] = (
    differs(
        "SampleRequest.prompt & ModelInput.chunks & EncodedTextChunk.tokens",
        sample,
        {f"{CHUNK}.tokens": [7, 8, 9]},
        {},
    ),
    refused("ModelInput.chunks", sample, {"prompt.chunks": []}),
    refused("EncodedTextChunk.tokens", sample, {f"{CHUNK}.tokens": [-1]}),
    refused("EncodedTextChunk.type", sample, {f"{CHUNK}.type": "text"}, "prompt.chunks.0", "text"),
    refused(
        "ImageChunk.type & ImageChunk.data & ImageChunk.format & ImageChunk.expected_tokens",
        sample,
        {CHUNK: IMAGE},
        CHUNK,
        "image",
    ),
    refused(
        "ImageAssetPointerChunk.type & ImageAssetPointerChunk.location & ImageAssetPointerChunk.format"
        " & ImageAssetPointerChunk.expected_tokens",
        sample,
        {CHUNK: POINTER},
        CHUNK,
        "image_asset_pointer",
    ),
    refused("DmelChunk.type & DmelChunk.dmel", sample, {CHUNK: DMEL}, CHUNK, "dmel"),
    differs("SampleRequest.sampling_params", sample, {"sampling_params": {"max_tokens": 4, "seed": 2}}, {}),
    differs("SamplingParams.max_tokens", sample, {"sampling_params.max_tokens": 2}, {}),
    differs("SamplingParams.seed", sample, {"sampling_params.seed": 2}, {}),
    differs("SamplingParams.stop", sample, {"sampling_params.stop": list(range(2000))}, {}),
    differs("SamplingParams.temperature", sample, {"sampling_params.temperature": 0.0}, {}),
    differs("SamplingParams.top_k", sample, {"sampling_params.top_k": 1}, {}),
    differs("SamplingParams.top_p", sample, {"sampling_params.top_p": 1e-6}, {}),
    differs("SampleRequest.num_samples", sample, {"num_samples": 2}, {}),
    refused("SampleRequest.sampling_session_id", sample, {"sampling_session_id": "nobody:sample:0"}),
    refused("SampleRequest.seq_id", sample, {"seq_id": -1}),
    refused("SampleRequest.base_model", sample, {"base_model": "tiny"}),
    refused("SampleRequest.model_path", sample, {"model_path": "tinker://a/b/c"}),
    differs("SampleRequest.prompt_logprobs", sample, {"prompt_logprobs": True}, {}),
    differs("SampleRequest.topk_prompt_logprobs", sample, {"topk_prompt_logprobs": 2}, {"topk_prompt_logprobs": 1}),
    differs("SampleRequest.topk_sample_logprobs", sample, {"topk_sample_logprobs": 2}, {"topk_sample_logprobs": 1}),
    differs(f"SampleRequest.{T}", scored, {}, {T: None}),
    differs("TensorData.data", scored, {f"{T}": {"data": [1, 2, 3, 4, 5], "dtype": "int64", "shape": [5, 1]}}, {}),
    refused("TensorData.dtype", scored, {T: {"data": [1] * 5, "dtype": "float32", "shape": [5, 1]}}),
    refused("TensorData.shape", scored, {T: {"data": [1] * 5, "dtype": "int64", "shape": [1, 5]}}),
    differs(
        "TensorData.sparse_crow_indices",
        scored_sparsely,
        {T: {**SPARSE, "sparse_crow_indices": [0, 0, 1, 2, 3, 3]}},
        {},
    ),
    differs(
        "TensorData.sparse_col_indices",
        scored_sparsely,
        {T: {**SPARSE, "sparse_col_indices": [1, 1, 1]}},
        {},
    ),
    differs("SampleRequest.prompt_alt_tokens_k", sample, {"prompt_alt_tokens_k": 2}, {}),
    differs(
        "SampleRequest.prompt_logprobs_last_n",
        sample,
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 2},
        {"prompt_logprobs": True},
    ),
    refused("SampleRequest.prompt_logprobs_last_n", sample, {"prompt_logprobs_last_n": 2}),
    refused("SampleRequest.type", sample, {"type": "asample"}),
    # -- sampling sessions
    refused("CreateSamplingSessionRequest.session_id", sampling_session, {"session_id": "nobody"}),
    differs(
        "CreateSamplingSessionRequest.sampling_session_seq_id",
        sampling_session,
        {"sampling_session_seq_id": 701},
        {"sampling_session_seq_id": 702},
    ),
    refused("CreateSamplingSessionRequest.base_model", sampling_session, {"base_model": "no/such"}),
    differs(
        "CreateSamplingSessionRequest.model_path",
        sampling_session,
        {"base_model": ABSENT, "model_path": "$sampler_weights"},
        {},
    ),
    refused("CreateSamplingSessionRequest.type", sampling_session, {"type": "sample"}),
    refused("JoinSamplingSessionRequest.sampling_session_id", join, {"sampling_session_id": "nobody:sample:0"}),
    refused("JoinSamplingSessionRequest.type", join, {"type": "join"}),
)

_NAMED: tuple[Check, ...] = tuple(
    check
    for model, probe in (
        ("SaveWeightsRequest", save_weights),
        ("SaveWeightsForSamplerRequest", save_named_sampler),
        ("SaveWeightsExternalRequest", save_external),
    )
    for check in (
        refused(f"{model}.model_id", probe, {"model_id": "nobody:train:0"}),
        refused(f"{model}.seq_id", probe, {"seq_id": 0}),
        differs(f"{model}.path", probe, {"path": f"one-{model}"}, {"path": f"two-{model}"}),
        refused(f"{model}.path", probe, {"path": "a/b"}),
        differs(f"{model}.ttl_seconds", probe, {"ttl_seconds": 7200}, {}),
        refused(f"{model}.ttl_seconds", probe, {"ttl_seconds": 60}),
        refused(f"{model}.type", probe, {"type": "save"}),
    )
)

SAVES: tuple[Check, ...] = (
    *_NAMED,
    differs("SaveWeightsRequest.user_metadata", save_weights, {"user_metadata": {"a": "1"}}, {}),
    differs("SaveWeightsForSamplerRequest.user_metadata", save_named_sampler, {"user_metadata": {"a": "1"}}, {}),
    decides(
        "SaveWeightsRequest.overwrite", save_weights, {"path": "$taken", "overwrite": True}, {"path": "$taken"}, "path"
    ),
    decides(
        "SaveWeightsForSamplerRequest.overwrite",
        save_named_sampler,
        {"path": "$taken", "overwrite": True},
        {"path": "$taken"},
        "path",
    ),
    differs(
        "SaveWeightsForSamplerRequest.sampling_session_seq_id",
        save_ephemeral,
        {"sampling_session_seq_id": 801},
        {"sampling_session_seq_id": 802},
    ),
    differs("SaveWeightsForSamplerRequest.kind", save_ephemeral, {"kind": "inflight"}, {}),
    refused("SaveWeightsForSamplerRequest.ttl_seconds", save_ephemeral, {"ttl_seconds": 7200}),
    refused("SaveWeightsForSamplerRequest.user_metadata", save_ephemeral, {"user_metadata": {"a": "1"}}),
    differs(
        "SaveWeightsExternalRequest.age_encryption_recipients",
        save_external,
        {"age_encryption_recipients": [RECIPIENT]},
        {},
    ),
    refused(
        "SaveWeightsExternalRequest.age_encryption_recipients", save_external, {"age_encryption_recipients": ["x"]}
    ),
)

POLLS: tuple[Check, ...] = (
    refused("FutureRetrieveRequest.request_id", retrieve, {"request_id": "nobody:train:0:1"}),
    differs("FutureRetrieveRequest.allow_metadata_only", retrieve, {"allow_metadata_only": True}, {}),
    differs("POST retrieve_future accept:", retrieve_as, {"accept": "application/json"}, {"accept": PROTOBUF}),
    refused("CancelFuture.request_id", cancel, {"request_id": "nobody:sample:0:0"}, "sampling_session"),
    refused("CancelFuture.request_id", cancel, {"request_id": "nobody:train:0:0"}),
    refused("FuturesRetrieveRequest.target", retrieve_futures, {"target": ABSENT}),
    refused("SamplingSessionFuturesTarget.type", retrieve_futures, {"target.type": "session"}, "target.type"),
    refused(
        "SamplingSessionFuturesTarget.sampling_session_id",
        retrieve_futures,
        {"target.sampling_session_id": "nobody:sample:0"},
    ),
    differs("SamplingSessionFuturesTarget.cloned_sampler_id", retrieve_futures, {"target.cloned_sampler_id": 1}, {}),
    differs("FuturesRetrieveRequest.prev_cursor", retrieve_futures, {"prev_cursor": "last"}, {}),
    differs(
        "FuturesRetrieveRequest.timeout",
        retrieve_futures,
        {"prev_cursor": "last", "timeout": 0.5},
        {"prev_cursor": "last"},
    ),
    inert(
        "FuturesRetrieveRequest.retrieved_request_ids",
        retrieve_futures,
        {"retrieved_request_ids": ["somebody:sample:0:0"]},
        {},
        why="a result that its client has is kept for another minute",
    ),
    refused("FuturesRetrieveRequest.retrieved_request_ids", retrieve_futures, {"retrieved_request_ids": "x"}),
    decides(
        "POST forward_backward content-encoding:",
        forward_backward_in,
        {"packed": True, "type": PROTOBUF, "encoding": "zstd"},
        {"packed": True, "type": PROTOBUF, "encoding": "br"},
        "Content-Encoding",
    ),
    decides(
        "POST forward_backward content-type:",
        forward_backward_in,
        {"packed": False, "type": PROTOBUF, "encoding": ""},
        {"packed": False, "type": "text/plain", "encoding": ""},
        "Content-Type",
    ),
)

SAMPLING = (*SAMPLES, *SAVES, *POLLS)
