"""Results in JSON say what the same results in protobuf say, in the forms that older SDKs read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from app.wire import tinker_pb2 as pb
from app.wire.results_json import forward_backward_json, sample_json
from app.wire.sampling import encode_result
from app.wire.training import encode_output
from app.wire.types import NO_TOKEN_LOGPROB, ForwardBackwardOutput, SampledSequence, SampleResult, TopK

SHAPES = arrays.array_shapes(max_dims=2, max_side=5)


def read(pieces: list[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(b"".join(pieces))
    return found


def sampled(**fields: Any) -> dict[str, Any]:
    sequence = SampledSequence("stop", np.array([7, 8], np.int32), np.array([-0.5, -1], np.float32))
    return read(sample_json(encode_result(SampleResult([sequence], **fields))))


@given(st.lists(arrays.arrays(np.float32, SHAPES, elements=st.floats(-100, 100, width=32)), min_size=1, max_size=5))
def test_every_datum_keeps_its_numbers_and_shape(logprobs: list[np.ndarray]) -> None:
    output = ForwardBackwardOutput([{"logprobs": array, "other": -array} for array in logprobs], {"loss:sum": 1.5})
    found = read(forward_backward_json(encode_output(output)))
    assert found["metrics"] == {"loss:sum": 1.5}
    assert found["loss_fn_output_type"] == "ArrayRecord"
    for datum, array in zip(found["loss_fn_outputs"], logprobs, strict=True):
        assert (datum["logprobs"]["dtype"], datum["logprobs"]["shape"]) == ("float32", list(array.shape))
        assert np.array_equal(np.array(datum["logprobs"]["data"], np.float32), array.reshape(-1))
        assert np.array_equal(np.array(datum["other"]["data"], np.float32), -array.reshape(-1))


def test_a_run_that_diverged_is_told_so() -> None:
    output = ForwardBackwardOutput([{"logprobs": np.array([np.nan, -np.inf, 1], np.float32)}], {"loss:sum": math.inf})
    found = read(forward_backward_json(encode_output(output)))
    assert found["loss_fn_outputs"][0]["logprobs"]["data"] == ["NaN", "-Infinity", 1.0]
    assert found["metrics"] == {"loss:sum": "Infinity"}


def test_large_results_come_in_small_pieces() -> None:
    array = np.arange(300_000, dtype=np.float32)
    pieces = forward_backward_json(encode_output(ForwardBackwardOutput([{"logprobs": array}], {})))
    assert max(map(len, pieces)) < 2**20
    assert read(pieces)["loss_fn_outputs"][0]["logprobs"]["data"] == array.tolist()


def test_a_sample_is_its_sequences() -> None:
    assert sampled(prompt_cache_hit_tokens=3) == {
        "type": "sample",
        "sequences": [{"stop_reason": "stop", "tokens": [7, 8], "logprobs": [-0.5, -1.0]}],
        "prompt_cache_hit_tokens": 3,
    }


def test_prompt_logprobs_that_were_not_computed_are_null() -> None:
    found = sampled(prompt_logprobs=np.array([np.nan, -1, -2], np.float32))
    assert found["prompt_logprobs"] == [None, -1.0, -2.0]


def test_a_row_without_tokens_is_null_and_unused_cells_are_left_out() -> None:
    no = NO_TOKEN_LOGPROB
    topk = TopK(np.array([[0, 0], [0, 5], [9, 0]], np.int32), np.array([[no, no], [-1, -2], [-0.5, no]], np.float32))
    assert sampled(topk_prompt_logprobs=topk)["topk_prompt_logprobs"] == [None, [[0, -1.0], [5, -2.0]], [[9, -0.5]]]


def test_a_long_top_k_is_whole() -> None:
    ids = np.arange(30_000, dtype=np.int32).reshape(-1, 3) + 1
    topk = TopK(ids, -ids.astype(np.float32))
    rows = sampled(topk_prompt_logprobs=topk)["topk_prompt_logprobs"]
    assert rows == [[[token, -float(token)] for token in row] for row in ids.tolist()]


def test_what_only_newer_clients_ask_for_is_there_too() -> None:
    message = pb.SampleResponse()
    sequence = message.sequences.add(stop_reason=pb.STOP_REASON_LENGTH, tokens=np.array([1], "<i4").tobytes())
    sequence.topk_sampled_logprobs.k = sequence.topk_sampled_logprobs.length = 1
    sequence.topk_sampled_logprobs.token_ids = np.array([4], "<i4").tobytes()
    sequence.topk_sampled_logprobs.logprobs = np.array([-1], "<f4").tobytes()
    scored = message.target_prompt_logprobs
    scored.dtype, scored.shape[:] = pb.DTYPE_FLOAT32, [2, 2]
    scored.sparse_csr.values = np.array([-3], "<f4").tobytes()
    scored.sparse_csr.crow_indices = np.array([0, 0, 1], "<i8").tobytes()
    scored.sparse_csr.col_indices = np.array([1], "<i8").tobytes()
    drawn = message.prompt_alt_tokens.tokens
    drawn.dtype, drawn.shape[:], drawn.dense = pb.DTYPE_INT64, [1, 2], np.array([3, 4], "<i8").tobytes()
    message.prompt_alt_tokens.logprobs.CopyFrom(pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[0]))
    found = read(sample_json(message.SerializeToString()))
    assert found["sequences"] == [{"stop_reason": "length", "tokens": [1], "topk_logprobs": [[[4, -1.0]]]}]
    assert found["target_prompt_logprobs"] == {
        "dtype": "float32",
        "shape": [2, 2],
        "data": [-3.0],
        "sparse_crow_indices": [0, 0, 1],
        "sparse_col_indices": [1],
    }
    assert found["prompt_alt_tokens"]["tokens"] == {"dtype": "int64", "shape": [1, 2], "data": [3, 4]}
