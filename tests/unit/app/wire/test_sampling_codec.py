"""Samples: what we write the official SDK reads, and what waits in Redis comes back as it was."""

from __future__ import annotations

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tinker.proto.response_conv import deserialize_sample_response

from app.wire.sampling import SAMPLE_FORMAT, StoredSample, decode_stored, encode_result, encode_stored
from app.wire.types import (
    NO_TOKEN_LOGPROB,
    AltTokens,
    PromptTargets,
    SampledSequence,
    SampleRequest,
    SampleResult,
    SamplingParams,
    TargetLogprobs,
    TopK,
)

TOKENS = st.integers(0, 2**31 - 1)
LENGTHS = st.integers(1, 6)


@st.composite
def sequences(draw: st.DrawFn) -> SampledSequence:
    length = draw(LENGTHS)
    return SampledSequence(
        draw(st.sampled_from(["stop", "length"])),
        draw(arrays.arrays(np.int32, length, elements=TOKENS)),
        draw(arrays.arrays(np.float32, length, elements=st.floats(-100, 0, width=32))),
    )


@given(st.lists(sequences(), min_size=1, max_size=4))
def test_the_sdk_reads_the_sequences_that_we_write(sampled: list[SampledSequence]) -> None:
    got = deserialize_sample_response(encode_result(SampleResult(sampled)))
    assert len(got.sequences) == len(sampled)
    for sequence, expected in zip(got.sequences, sampled, strict=True):
        assert sequence.stop_reason == expected.stop_reason
        assert sequence.tokens == expected.tokens.tolist()
        assert sequence.logprobs == expected.logprobs.tolist()
    assert got.prompt_logprobs is None
    assert got.topk_prompt_logprobs is None
    assert got.target_prompt_logprobs is None
    assert got.prompt_alt_tokens is None


def one_sequence(topk: TopK | None = None) -> SampledSequence:
    return SampledSequence("stop", np.int32([7]), np.float32([-0.5]), topk)


def test_prompt_logprobs_have_none_where_we_have_nan() -> None:
    prompt = np.float32([np.nan, -1.5, -0.25])
    got = deserialize_sample_response(encode_result(SampleResult([one_sequence()], prompt_logprobs=prompt)))
    assert got.prompt_logprobs == [None, -1.5, -0.25]


def test_the_most_probable_tokens_come_back_row_by_row() -> None:
    rows = TopK(
        np.int32([[0, 0], [5, 9], [3, 0]]),
        np.float32([[NO_TOKEN_LOGPROB, NO_TOKEN_LOGPROB], [-0.5, -2.0], [-0.25, NO_TOKEN_LOGPROB]]),
    )
    sampled = TopK(np.int32([[7, 8]]), np.float32([[-0.5, -1.0]]))
    result = SampleResult([one_sequence(sampled)], topk_prompt_logprobs=rows, prompt_cache_hit_tokens=2)
    got = deserialize_sample_response(encode_result(result))
    assert got.topk_prompt_logprobs is not None
    assert got.topk_prompt_logprobs[0] is None
    assert got.topk_prompt_logprobs[1] == [(5, -0.5), (9, -2.0)]
    assert got.sequences[0].topk_logprobs is not None
    assert got.sequences[0].topk_logprobs[0] == [(7, -0.5), (8, -1.0)]
    assert got.prompt_cache_hit_tokens == 2


def test_logprobs_of_targets_come_back_in_the_layout_of_the_targets() -> None:
    ids = np.array([[-1, 3, -1, -1], [-1, -1, -1, -1], [9, -1, -1, 2]])
    wanted = [[0, -0.5, 0, 0], [0, 0, 0, 0], [-1.5, 0, 0, -2.0]]
    dense = PromptTargets((3, 4), ids.ravel().tolist())
    sparse = PromptTargets((3, 4), [3, 9, 2], [0, 1, 1, 3], [1, 0, 3])
    for targets, values in ((dense, np.float32(wanted).ravel()), (sparse, np.float32([-0.5, -1.5, -2.0]))):
        result = SampleResult([one_sequence()], target_prompt_logprobs=TargetLogprobs(targets, values))
        got = deserialize_sample_response(encode_result(result)).target_prompt_logprobs
        assert got is not None
        assert (got.dtype, got.shape, got.sparse_crow_indices) == ("float32", [3, 4], targets.rows)
        assert got.tolist() == wanted


@pytest.mark.parametrize("rows", [0, 2])
def test_alternatives_come_back_as_two_matrices(rows: int) -> None:
    tokens = np.int64([[5, 6, 5], [7, 8, 9]])[:rows]
    logprobs = np.float32([[-0.5, -1.0, -0.5], [-3.0, -2.0, -1.0]])[:rows]
    result = SampleResult([one_sequence()], prompt_alt_tokens=AltTokens(tokens, logprobs))
    got = deserialize_sample_response(encode_result(result)).prompt_alt_tokens
    assert got is not None
    assert (got.tokens.dtype, got.tokens.shape, got.logprobs.shape) == ("int64", [rows, 3], [rows, 3])
    assert got.tokens.tolist() == tokens.tolist()
    assert got.logprobs.tolist() == logprobs.tolist()


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.none() | st.integers(1, 10_000),
    temperature=st.floats(0, 10),
    top_k=st.integers(-1, 1000),
    top_p=st.floats(0.01, 1),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    stop_tokens=st.none() | st.lists(TOKENS, max_size=3).map(tuple),
    stop_strings=st.none() | st.lists(st.text(st.characters(codec="utf-8"), min_size=1), max_size=3).map(tuple),
)
REQUESTS = st.builds(
    SampleRequest,
    request_id=st.just("s:sample:0:0"),
    prompt=st.lists(TOKENS, min_size=1, max_size=8),
    params=PARAMS,
    num_samples=st.integers(1, 64),
    prompt_logprobs=st.booleans(),
    topk_prompt_logprobs=st.integers(0, 20),
    topk_sample_logprobs=st.integers(0, 20),
    prompt_logprobs_last_n=st.none() | st.integers(1, 100),
    target_prompt_logprobs=st.none()
    | st.just(PromptTargets((2, 2), [1, -1, 3, 4]))
    | st.just(PromptTargets((2, 2), [1, -1], [0, 1, 2], [0, 1])),
    prompt_alt_tokens_k=st.integers(0, 9),
    record=st.booleans(),
)


@given(REQUESTS, st.none() | st.just("a" * 32))
def test_a_stored_request_comes_back_as_it_was(request: SampleRequest, snapshot_id: str | None) -> None:
    stored = StoredSample("owner", "s", "tiny", snapshot_id, request)
    assert decode_stored(encode_stored(stored)) == stored


def test_a_request_of_a_newer_format_is_left_to_others() -> None:
    stored = StoredSample("owner", "s", "tiny", None, SampleRequest("s:sample:0:0", [1], SamplingParams()))
    newer = {**orjson.loads(encode_stored(stored)), "format": SAMPLE_FORMAT + 1}
    with pytest.raises(ValueError, match="newer"):
        decode_stored(orjson.dumps(newer))


def test_a_request_of_the_first_format_is_understood() -> None:
    stored = StoredSample("owner", "s", "tiny", None, SampleRequest("s:sample:0:0", [1], SamplingParams()))
    older = {**orjson.loads(encode_stored(stored)), "format": 1}
    for field in ("target_prompt_logprobs", "prompt_alt_tokens_k", "record"):
        del older["request"][field]
    assert decode_stored(orjson.dumps(older)) == stored
