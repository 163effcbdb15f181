"""`forward_backward` as the official SDK writes it is what we read, and what we write is what it reads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tinker import types
from tinker.proto import tinker_public_pb2 as sdk
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest

from app.errors import InvalidRequest
from app.wire.training import (
    canonical_forward_backward,
    decode_forward_backward,
    encode_output,
    parse_forward_backward,
)
from app.wire.types import ForwardBackward, ForwardBackwardOutput, ProvenanceSpan

INT32 = st.integers(-(2**31), 2**31 - 1)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
DENSE = st.one_of(
    arrays.arrays(np.int64, arrays.array_shapes(max_dims=2, max_side=5)),
    arrays.arrays(np.float32, arrays.array_shapes(max_dims=2, max_side=5)),
)
CHUNKS = st.lists(st.lists(INT32, max_size=6), max_size=4)


def decode(body: bytes) -> ForwardBackward:
    return decode_forward_backward(parse_forward_backward(body))


def message(**fields: object) -> sdk.ForwardBackwardRequest:
    """A small valid request, in the SDK's classes, with `fields` on top."""
    values: dict[str, object] = {"model_id": "s:train:0", "seq_id": 1, "loss_fn": "cross_entropy"}
    request = sdk.ForwardBackwardRequest(**(values | fields))
    if not request.data:
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(3, dtype=np.int32).tobytes()
        datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor(np.arange(3)))
    return request


def tensor(array: np.ndarray) -> sdk.Tensor:
    kind = sdk.DTYPE_INT64 if array.dtype.kind == "i" else sdk.DTYPE_FLOAT32
    return sdk.Tensor(dense=array.tobytes(), dtype=kind, shape=array.shape)


def sparse(dense: np.ndarray) -> sdk.Tensor:
    """CSR as its definition says: the values row by row, where each row begins, each value's column."""
    rows, columns = np.nonzero(dense)
    begins = np.array([int((rows < r).sum()) for r in range(len(dense) + 1)], np.int64)
    kind = sdk.DTYPE_INT64 if dense.dtype.kind == "i" else sdk.DTYPE_FLOAT32
    result = sdk.Tensor(dtype=kind, shape=dense.shape)
    result.sparse_csr.values = dense[rows, columns].tobytes()
    result.sparse_csr.crow_indices = begins.tobytes()
    result.sparse_csr.col_indices = columns.astype(np.int64).tobytes()
    return result


def with_input(value: sdk.Tensor) -> bytes:
    request = message()
    request.data[0].loss_fn_inputs["weights"].CopyFrom(value)
    return request.SerializeToString()


@given(st.lists(st.tuples(CHUNKS, st.dictionaries(NAMES, DENSE, max_size=3)), max_size=4), st.integers(1, 2**31 - 1))
def test_what_the_sdk_writes_is_read_unchanged(
    data: list[tuple[list[list[int]], dict[str, np.ndarray]]], seq_id: int
) -> None:
    datums = [
        types.Datum(
            model_input=types.ModelInput(chunks=[types.EncodedTextChunk(tokens=tokens) for tokens in chunks]),
            loss_fn_inputs={
                name: types.TensorData(
                    data=array.ravel().tolist(),
                    dtype="int64" if array.dtype.kind == "i" else "float32",
                    shape=list(array.shape),
                )
                for name, array in inputs.items()
            },
        )
        for chunks, inputs in data
    ]
    request = ForwardBackwardRequest(
        model_id="s:train:0", seq_id=seq_id, forward_backward_input=ForwardBackwardInput(data=datums, loss_fn="ppo")
    )
    got = decode(forward_backward_request_to_proto(request).SerializeToString())
    assert (got.model_id, got.seq_id, got.loss_fn, got.forward_only) == ("s:train:0", seq_id, "ppo", False)
    assert len(got.data) == len(data)
    for datum, (chunks, inputs) in zip(got.data, data, strict=True):
        assert datum.tokens.tolist() == [token for chunk in chunks for token in chunk]
        assert datum.inputs.keys() == inputs.keys()
        for name, array in inputs.items():
            assert datum.inputs[name].dtype == array.dtype
            np.testing.assert_array_equal(datum.inputs[name], array)


@given(arrays.arrays(np.int64, st.tuples(st.integers(1, 6), st.integers(1, 6)), elements=st.integers(-3, 3)))
def test_a_sparse_array_is_read_as_the_dense_one(dense: np.ndarray) -> None:
    got = decode(with_input(sparse(dense))).data[0].inputs["weights"]
    np.testing.assert_array_equal(got, dense)


def test_an_array_without_a_shape_has_one_dimension() -> None:
    values = np.float32([1, 2, 3])
    got = decode(with_input(sdk.Tensor(dense=values.tobytes(), dtype=sdk.DTYPE_FLOAT32)))
    np.testing.assert_array_equal(got.data[0].inputs["weights"], values)


def test_strings_and_numbers_of_the_second_config_win_over_the_first() -> None:
    request = message()
    request.loss_fn_config["beta"] = 1.0
    request.loss_fn_config["gamma"] = 2.0
    request.loss_fn_config_v2["beta"].number = 3.0
    request.loss_fn_config_v2["mode"].text = "soft"
    assert decode(request.SerializeToString()).loss_config == {"beta": 3.0, "gamma": 2.0, "mode": "soft"}


def with_spans(first: int = 1, length: int = 2, sequence_id: str = "s:sample:0:0:0") -> sdk.ForwardBackwardRequest:
    """A datum whose provenance is a prompt of `first` tokens and `length` sampled ones."""
    request = message()
    for spans in (request.data[0].model_input_spans, request.data[0].loss_fn_input_spans):
        prompt, sampled = spans.add().prompt_tokens, spans.add().sampled_tokens
        prompt.sequence_id, prompt.length = "s:sample:0:0:0", first
        sampled.sequence_id, sampled.offset, sampled.length = sequence_id, 4, length
    return request


def test_provenance_spans_are_read() -> None:
    (datum, *_) = decode(with_spans().SerializeToString()).data
    sequence = "s:sample:0:0:0"
    assert datum.loss_fn_input_spans == [
        ProvenanceSpan(False, sequence, 0, 1),
        ProvenanceSpan(True, sequence, 4, 2),
    ]
    assert datum.model_input_spans == datum.loss_fn_input_spans
    assert datum.is_sampled.tolist() == [False, True, True]


def test_a_span_may_be_empty() -> None:
    assert decode(with_spans(0, 3).SerializeToString()).data[0].is_sampled.all()


def without(field: str) -> sdk.ForwardBackwardRequest:
    request = with_spans()
    request.data[0].ClearField(field)
    return request


def kindless() -> sdk.ForwardBackwardRequest:
    request = with_spans()
    request.data[0].model_input_spans.add()
    return request


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (with_spans(2, 2), r"data\[0\].model_input_spans: cover 4 positions, but there are 3"),
        (with_spans(5, -2), r"data\[0\].model_input_spans\[1\]: offset 4 and length -2"),
        (with_spans(1, 2, ""), r"data\[0\].model_input_spans\[1\].sequence_id: missing"),
        (without("model_input_spans"), r"data\[0\].model_input_spans: missing"),
        (without("loss_fn_input_spans"), r"data\[0\].loss_fn_input_spans: missing"),
        (kindless(), r"data\[0\].model_input_spans\[2\]: is neither"),
    ],
)
def test_a_wrong_span_is_refused_by_name(request_: sdk.ForwardBackwardRequest, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        decode(request_.SerializeToString())


WRONG_TENSORS = {
    "int32": (sdk.Tensor(dense=b"\0" * 12, dtype=sdk.DTYPE_INT32, shape=[3]), "dtype"),
    "no dtype": (sdk.Tensor(dense=b"\0" * 12, shape=[3]), "dtype"),
    "half a value": (sdk.Tensor(dense=b"\0" * 11, dtype=sdk.DTYPE_FLOAT32), "whole float32"),
    "too few values": (sdk.Tensor(dense=b"\0" * 12, dtype=sdk.DTYPE_FLOAT32, shape=[4]), "do not fill"),
    "negative shape": (sdk.Tensor(dense=b"\0" * 12, dtype=sdk.DTYPE_FLOAT32, shape=[-1, -3]), "shape"),
    "overflowing shape": (sdk.Tensor(dtype=sdk.DTYPE_FLOAT32, shape=[2**62, 4]), "shape"),
    "huge sparse": (sdk.Tensor(sparse_csr=sdk.SparseCsr(), dtype=sdk.DTYPE_FLOAT32, shape=[2**20, 2**20]), "shape"),
    "sparse in one dimension": (sdk.Tensor(sparse_csr=sdk.SparseCsr(), dtype=sdk.DTYPE_INT64, shape=[4]), "two"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_a_wrong_array_is_refused_by_datum_and_field(case: str) -> None:
    value, words = WRONG_TENSORS[case]
    with pytest.raises(InvalidRequest, match=words) as caught:
        decode(with_input(value))
    assert caught.value.detail.startswith("data[0].loss_fn_inputs['weights']")


def csr(crow: list[int], col: list[int], values: list[float]) -> sdk.Tensor:
    result = sdk.Tensor(dtype=sdk.DTYPE_FLOAT32, shape=[2, 3])
    result.sparse_csr.values = np.float32(values).tobytes()
    result.sparse_csr.crow_indices = np.array(crow, np.int64).tobytes()
    result.sparse_csr.col_indices = np.array(col, np.int64).tobytes()
    return result


WRONG_CSR = {
    "no row indices": csr([], [], []),
    "too few rows": csr([0, 1], [0], [1]),
    "not from zero": csr([1, 1, 1], [0], [1]),
    "rows that run back": csr([0, 2, 1], [0], [1]),
    "row end beyond the values": csr([0, 1, 5], [0], [1]),
    "column outside": csr([0, 1, 1], [3], [1]),
    "negative column": csr([0, 1, 1], [-1], [1]),
    "more columns than values": csr([0, 1, 2], [0, 1], [1]),
}


@pytest.mark.parametrize("case", WRONG_CSR)
def test_sparse_indices_that_do_not_fit_are_refused(case: str) -> None:
    with pytest.raises(InvalidRequest, match=r"data\[0\]\.loss_fn_inputs\['weights'\]"):
        decode(with_input(WRONG_CSR[case]))


def test_many_small_sparse_arrays_cannot_unfold_to_much_memory() -> None:
    request = message()
    wide = csr([0, 0], [], [])
    wide.shape[:] = [1, 2**26]
    for _ in range(64):
        request.data.add().loss_fn_inputs["weights"].CopyFrom(wide)
    assert request.ByteSize() < 8192
    with pytest.raises(InvalidRequest, match="sparse"):
        decode(request.SerializeToString())


@pytest.mark.parametrize("kind", ["image", "dmel"])
def test_a_chunk_that_is_not_text_is_refused_by_its_kind(kind: str) -> None:
    request = message()
    getattr(request.data[0].model_input.add(), kind).SetInParent()
    with pytest.raises(InvalidRequest, match=rf"data\[0\]\.model_input\.chunks\[1\]: {kind} chunks"):
        decode(request.SerializeToString())


def test_tokens_that_are_not_whole_are_refused() -> None:
    request = message()
    request.data[0].model_input[0].encoded_text.tokens = b"12345"
    with pytest.raises(InvalidRequest, match=r"data\[0\]\.model_input\.chunks\[0\]\.tokens"):
        decode(request.SerializeToString())


def test_a_config_entry_without_a_value_is_refused_by_name() -> None:
    request = message()
    request.loss_fn_config_v2["beta"].SetInParent()
    with pytest.raises(InvalidRequest, match=r"loss_fn_config\['beta'\]"):
        decode(request.SerializeToString())


UNKNOWN_FIELD = bytes([99 << 3 & 0x7F | 0x80, 99 >> 4, 7])
"""Field 99, a varint, as any protobuf writer would write it."""


def nested(place: str) -> bytes:
    """A request with field 99 in one of its messages."""
    if place == "request":
        return message().SerializeToString() + UNKNOWN_FIELD
    request = message()
    datum = request.data[0]
    weights = datum.loss_fn_inputs["weights"]
    weights.CopyFrom(sparse(np.eye(3, dtype=np.float32)))
    inner = {
        "datum": datum,
        "chunk": datum.model_input[0],
        "text": datum.model_input[0].encoded_text,
        "tensor": weights,
        "sparse": weights.sparse_csr,
    }[place]
    inner.MergeFromString(UNKNOWN_FIELD)
    return request.SerializeToString()


@pytest.mark.parametrize("place", ["request", "datum", "chunk", "text", "tensor", "sparse"])
def test_a_field_that_we_do_not_know_is_refused_by_its_number(place: str) -> None:
    with pytest.raises(InvalidRequest, match="unknown protobuf field number 99"):
        decode(nested(place))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_request_or_an_invalid_request(body: bytes) -> None:
    try:
        decode(body)
    except InvalidRequest as error:
        assert error.detail


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_damaged_request_is_read_or_refused(position: int, byte: int) -> None:
    body = bytearray(nested("tensor"))
    body[position % len(body)] = byte
    try:
        decode(bytes(body))
    except InvalidRequest as error:
        assert error.detail


@pytest.mark.parametrize(("fields", "name"), [({"model_id": ""}, "model_id"), ({"seq_id": 0}, "seq_id")])
def test_a_request_without_a_place_in_a_sequence_is_refused(fields: dict[str, object], name: str) -> None:
    with pytest.raises(InvalidRequest, match=name):
        parse_forward_backward(message(**fields).SerializeToString())


def test_equal_requests_have_equal_fingerprints_however_they_are_laid_out() -> None:
    first, second = message(), message()
    for request, names in ((first, ("a", "b")), (second, ("b", "a"))):
        for name in names:
            request.loss_fn_config[name] = 1.0
    half = len(second.SerializeToString()) // 2
    assert half
    reordered = sdk.ForwardBackwardRequest(seq_id=1, loss_fn="cross_entropy").SerializeToString()
    second.ClearField("seq_id")
    second.ClearField("loss_fn")
    marks = {
        canonical_forward_backward(parse_forward_backward(body))
        for body in (first.SerializeToString(), reordered + second.SerializeToString())
    }
    assert len(marks) == 1


@pytest.mark.parametrize(
    "fields", [{"forward_only": True}, {"loss_fn": "ppo"}, {"seq_id": 2}, {"model_id": "s:train:1"}]
)
def test_another_request_has_another_fingerprint(fields: dict[str, object]) -> None:
    bodies = message().SerializeToString(), message(**fields).SerializeToString()
    marks = {canonical_forward_backward(parse_forward_backward(body)) for body in bodies}
    assert len(marks) == 2


FLOATS = st.floats(width=32, allow_nan=False)
LOGPROBS = arrays.arrays(np.float32, arrays.array_shapes(min_dims=1, max_dims=2, max_side=4), elements=FLOATS)


@given(st.lists(LOGPROBS, min_size=1, max_size=6), st.floats(allow_nan=False))
def test_the_sdk_reads_the_outputs_that_we_write(outputs: list[np.ndarray], loss: float) -> None:
    result = ForwardBackwardOutput([{"logprobs": array} for array in outputs], {"loss:sum": loss})
    got = deserialize_forward_backward_output(encode_output(result))
    assert got.metrics == {"loss:sum": loss}
    assert len(got.loss_fn_outputs) == len(outputs)
    for datum, expected in zip(got.loss_fn_outputs, outputs, strict=True):
        assert datum["logprobs"].shape == list(expected.shape)
        np.testing.assert_array_equal(np.array(datum["logprobs"].data, np.float32), expected.ravel())
