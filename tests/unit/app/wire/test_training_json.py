"""A batch in JSON says what the same batch in protobuf says, and what no message can say is refused by name."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from app.errors import InvalidRequest
from app.wire.training import (
    canonical_forward_backward,
    decode_forward_backward,
    parse_forward_backward,
)
from app.wire.training_json import encode_request
from app.wire.types import ForwardBackward

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
ARRAYS = st.one_of(
    arrays.arrays(np.int64, arrays.array_shapes(max_dims=2, max_side=4)),
    arrays.arrays(np.float32, arrays.array_shapes(max_dims=2, max_side=4), elements=st.floats(width=32)),
)


def tensor(array: np.ndarray) -> dict[str, Any]:
    return {"data": array.reshape(-1).tolist(), "dtype": array.dtype.name, "shape": list(array.shape)}


def body(*datums: dict[str, Any], **fields: Any) -> dict[str, Any]:
    batch = {"data": list(datums) or [datum()], "loss_fn": "cross_entropy"} | fields
    return {"forward_backward_input": batch, "model_id": "s:train:0", "seq_id": 1}


def datum(**inputs: Any) -> dict[str, Any]:
    targets = {"target_tokens": {"data": [1, 2], "dtype": "int64"}}
    return {"model_input": {"chunks": [{"tokens": [5, 6]}]}, "loss_fn_inputs": targets | inputs}


def decode(data: dict[str, Any], *, forward_only: bool = False) -> ForwardBackward:
    message = encode_request(data, model_id=data["model_id"], seq_id=data["seq_id"], forward_only=forward_only)
    return decode_forward_backward(message)


@given(st.lists(TOKENS, min_size=1, max_size=3), ARRAYS)
def test_json_and_protobuf_of_one_batch_are_one_request(chunks: list[list[int]], array: np.ndarray) -> None:
    inputs = {"target_tokens": types.TensorData.from_numpy(array)}
    model_input = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens) for tokens in chunks])
    batch = ForwardBackwardInput(
        data=[types.Datum(model_input=model_input, loss_fn_inputs=inputs)],
        loss_fn="ppo",
        loss_fn_config={"clip_low_threshold": 0.5},
    )
    request = ForwardBackwardRequest(forward_backward_input=batch, model_id="s:train:0", seq_id=1)
    theirs = parse_forward_backward(forward_backward_request_to_proto(request).SerializeToString())
    theirs.loss_fn_config_v2.clear()  # which older SDKs do not know
    row = {
        "model_input": {"chunks": [{"tokens": tokens} for tokens in chunks]},
        "loss_fn_inputs": {"target_tokens": tensor(array)},
    }
    data = body(row, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.5})
    ours = encode_request(data, model_id="s:train:0", seq_id=1, forward_only=False)
    assert canonical_forward_backward(ours) == canonical_forward_backward(theirs)


def test_sparse_arrays_unfold() -> None:
    weights = {"data": [0.5, 2], "dtype": "float32", "shape": [2, 3]}
    weights |= {"sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [2, 0]}
    found = decode(body(datum(weights=weights))).data[0].inputs["weights"]
    assert found.tolist() == [[0, 0, 0.5], [2, 0, 0]]


def test_a_forward_is_one_by_its_own_name() -> None:
    data = body()
    data["forward_input"] = data.pop("forward_backward_input")
    assert decode(data, forward_only=True).forward_only


def test_nulls_and_absent_fields_are_the_same() -> None:
    row = datum(target_tokens={"data": [1, 2], "dtype": "int64", "shape": None, "sparse_crow_indices": None})
    row["model_input"]["chunks"][0]["type"] = None
    found = decode(body(row, loss_fn_config=None) | {"type": None})
    assert found.loss_config == {}
    assert found.data[0].inputs["target_tokens"].tolist() == [1, 2]


def test_whole_floats_are_tokens() -> None:
    targets = {"data": [1.0, 2.0], "dtype": "int64"}
    assert decode(body(datum(target_tokens=targets))).data[0].inputs["target_tokens"].dtype == np.int64


def inputs(**fields: Any) -> dict[str, Any]:
    return body(datum(target_tokens={"data": [1], "dtype": "int64"} | fields))


def chunk(**fields: Any) -> dict[str, Any]:
    row = datum()
    row["model_input"]["chunks"] = [fields]
    return body(row)


WHERE = "data[0].loss_fn_inputs['target_tokens']"
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"model_id": "s:train:0", "seq_id": 1}, "forward_backward_input: missing"),
    "unknown field": (body() | {"priority": 1}, "priority: unknown field"),
    "unknown in batch": (body(seed=1), "forward_backward_input.seed: unknown field"),
    "no loss": (body(loss_fn=None), "forward_backward_input.loss_fn: missing"),
    "loss": (body(loss_fn=3), "loss_fn: must be a text"),
    "no list": (body(data={}), "data: must be a list"),
    "no datum": (body([]), "data[0]: must be an object"),  # type: ignore[arg-type]
    "no model_input": (body({"loss_fn_inputs": {}}), "data[0].model_input: missing"),
    "config": (body(loss_fn_config=[]), "loss_fn_config: must be an object"),
    "config value": (body(loss_fn_config={"beta": True}), "loss_fn_config['beta']: must be a number or a text"),
    "config size": (body(loss_fn_config={"beta": 10**400}), "loss_fn_config['beta']: must be a finite number"),
    "image": (chunk(type="image", data=""), "data[0].model_input.chunks[0]: image chunks are not supported"),
    "mask": (chunk(tokens=[1], mask=[1]), "data[0].model_input.chunks[0].mask: unknown field"),
    "text": (chunk(tokens="abc"), "data[0].model_input.chunks[0].tokens: must be a list"),
    "texts": (chunk(tokens=["a"]), "data[0].model_input.chunks[0].tokens: must be a flat list of numbers"),
    "nested": (chunk(tokens=[[1]]), "data[0].model_input.chunks[0].tokens: must be a flat list of numbers"),
    "ragged": (chunk(tokens=[[1], 2]), "data[0].model_input.chunks[0].tokens: must be a flat list of numbers"),
    "booleans": (chunk(tokens=[True]), "data[0].model_input.chunks[0].tokens: must be a flat list of numbers"),
    "half a token": (chunk(tokens=[1.5]), "data[0].model_input.chunks[0].tokens: must hold whole numbers"),
    "large token": (chunk(tokens=[2**31]), "data[0].model_input.chunks[0].tokens: a number is no int32"),
    "null": (inputs(data=[1, None]), f"{WHERE}.data: must be a flat list of numbers"),
    "huge": (inputs(data=[2**70]), f"{WHERE}.data: must be a flat list of numbers"),
    "beyond": (inputs(data=[2**63]), f"{WHERE}.data: a number is no int64"),
    "just beyond": (inputs(data=[2.0**63]), f"{WHERE}.data: a number is no int64"),
    "no number": (inputs(data=[float("nan")]), f"{WHERE}.data: must hold whole numbers"),
    "float": (inputs(data=[1e300], dtype="float32"), f"{WHERE}.data: a number exceeds float32"),
    "dtype": (inputs(dtype="float16"), f"{WHERE}.dtype: only float32 and int64"),
    "rows only": (inputs(sparse_crow_indices=[0, 1], shape=[1, 1]), f"{WHERE}.sparse_col_indices: missing"),
    "shape": (inputs(shape=["x"]), f"{WHERE}.shape: must be a flat list of numbers"),
}


@pytest.mark.parametrize("odd", ["x" * 10_000, None, True, [1]])
def test_one_odd_value_among_many_numbers_costs_no_memory(odd: object) -> None:
    data = inputs(data=[odd, *[1] * 10_000])
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="must be a flat list of numbers"):
            encode_request(data, model_id="s:train:0", seq_id=1, forward_only=False)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("case", BAD)
def test_what_is_wrong_is_named(case: str) -> None:
    data, words = BAD[case]
    with pytest.raises(InvalidRequest) as refused:
        encode_request(data, model_id="s:train:0", seq_id=1, forward_only=False)
    assert words in refused.value.detail
