"""What a small `forward_backward` message can unfold to is bounded before it does, in the user's words."""

from __future__ import annotations

import time

import numpy as np
import pytest

from app.errors import InvalidRequest
from app.wire import tinker_pb2 as pb
from app.wire.nesting import exceeds_fields
from app.wire.training import MAX_DATUMS, decode_forward_backward, parse_forward_backward

DESCRIPTOR = pb.ForwardBackwardRequest.DESCRIPTOR
EMPTY_DATUM, EMPTY_CHUNK, UNKNOWN = b"\x1a\x00", b"\x0a\x00", b"\x78\x01"
UNKNOWN_GROUP = b"\x7b\x78\x01\x7c"
COUNTED_BYTES = 3 << 20


def message() -> pb.ForwardBackwardRequest:
    made = pb.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy")
    datum = made.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2, 3], "<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array([2, 3, 4], "<i8").tobytes(), pb.DTYPE_INT64
    return made


@pytest.mark.parametrize(
    ("dense", "shape", "words"),
    [
        (bytes(8), [1] * 65, "65 dimensions exceed the limit"),
        (bytes(8), [2**62] * 30_000, "30000 dimensions exceed the limit"),
        (b"", [0, 2**62], "is not a usable shape"),
        (b"", [2**62, 0, 2**62], "is not a usable shape"),
    ],
)
def test_a_shape_that_no_array_can_have_is_refused_at_once(dense: bytes, shape: list[int], words: str) -> None:
    request = message()
    targets = request.data[0].loss_fn_inputs["target_tokens"]
    targets.dense = dense
    targets.shape.extend(shape)
    with pytest.raises(InvalidRequest, match=words) as refused:
        decode_forward_backward(request)
    assert "data[0].loss_fn_inputs['target_tokens'].shape" in refused.value.detail


@pytest.mark.parametrize("shape", [[0, 2**62], [0, 2**40, 2], [1] * 80])
def test_a_sparse_shape_that_no_array_can_have_is_refused(shape: list[int]) -> None:
    request = message()
    targets = request.data[0].loss_fn_inputs["target_tokens"]
    targets.sparse_csr.crow_indices = bytes(8)
    targets.shape.extend(shape)
    with pytest.raises(InvalidRequest, match="shape"):
        decode_forward_backward(request)


def test_more_datums_than_any_batch_has_are_refused() -> None:
    request = pb.ForwardBackwardRequest.FromString(message().SerializeToString() + EMPTY_DATUM * MAX_DATUMS)
    with pytest.raises(InvalidRequest, match=f"data: {MAX_DATUMS + 1} datums exceed"):
        decode_forward_backward(request)


@pytest.mark.parametrize(
    "filling",
    [
        EMPTY_DATUM * (COUNTED_BYTES // 2),
        UNKNOWN * (COUNTED_BYTES // 2),
        b"\x1a\x80\x80\x80\x01" + EMPTY_CHUNK * (2**21 // 2),
        UNKNOWN_GROUP + EMPTY_DATUM * (COUNTED_BYTES // 2),
    ],
    ids=["datums", "unknown fields", "chunks", "datums behind a group"],
)
def test_a_body_of_very_many_fields_is_refused_before_it_is_parsed(filling: bytes) -> None:
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="protobuf fields"):
        parse_forward_backward(message().SerializeToString() + filling)
    assert time.process_time() - began < 2


def test_a_large_batch_is_within_the_bounds() -> None:
    request = message()
    for _ in range(2047):
        request.data.add().CopyFrom(request.data[0])
    body = (
        request.SerializeToString() + b"\x22" + b"\x80\x80\x40" + b"x" * (1 << 20)
    )  # a long name: the body is counted
    assert parse_forward_backward(body).data[2047] == request.data[0]


def fields_of(message: pb.ForwardBackwardRequest) -> int:
    """How many fields, by bisection."""
    body, low, high = message.SerializeToString(), 0, 1 << 20
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if exceeds_fields(body, DESCRIPTOR, middle) else (low, middle)
    return low


def test_fields_are_counted_at_every_depth() -> None:
    request = pb.ForwardBackwardRequest()
    assert fields_of(request) == 0
    request.data.add()
    assert fields_of(request) == 1
    request.data[0].model_input.add().encoded_text.tokens = b"1234"
    assert fields_of(request) == 4
    request.data[0].loss_fn_inputs["x"].shape.extend([1, 2])  # an entry, its key, its value, one packed array
    assert fields_of(request) == 8


@pytest.mark.parametrize("body", [b"\x80", b"\x80" * 30, b"\x1a\xff\xff\xff\xff\x0f", b"\x1b", b"\x0d\x01", b"\x07"])
def test_what_is_no_message_ends_the_count(body: bytes) -> None:
    assert not exceeds_fields(body, DESCRIPTOR, 30)
