"""`forward_backward` between bytes and the internal form (WIRE §4.2, §4.3).

Decoding checks what can be checked without knowing the model: that arrays have the bytes their shapes promise and that
every field is one we know. What only the model can decide (token range, context, loss inputs) is `app.runs.checks`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from app.errors import InvalidRequest
from app.wire import tinker_pb2 as pb
from app.wire.nesting import exceeds_fields
from app.wire.types import Datum, ForwardBackward, ForwardBackwardOutput, ProvenanceSpan

MAX_TENSOR_ELEMENTS = 1 << 26
"""Largest array, and largest dense form of all sparse arrays of a request: bounds what a few bytes can unfold to."""
MAX_DIMENSIONS = 8
MAX_DATUMS = 1 << 14
_MAX_FIELDS = 1 << 18
_COUNT_ABOVE_BYTES = 1 << 20
"""Larger messages have their fields counted; what a smaller one can hold takes no time that matters."""

_DTYPES: dict[int, np.dtype] = {pb.DTYPE_FLOAT32: np.dtype("<f4"), pb.DTYPE_INT64: np.dtype("<i8")}


def parse_forward_backward(body: bytes) -> pb.ForwardBackwardRequest:
    """Parse the protobuf message. Raises InvalidRequest when it is none, is nested beyond all reason, or names no
    `model_id` and `seq_id`."""
    message = pb.ForwardBackwardRequest()
    if len(body) > _COUNT_ABOVE_BYTES and exceeds_fields(body, message.DESCRIPTOR, _MAX_FIELDS):
        raise InvalidRequest(f"body: more than {_MAX_FIELDS} protobuf fields")
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise InvalidRequest("the body is not a ForwardBackwardRequest protobuf message") from error
    if not message.model_id:
        raise InvalidRequest("model_id: missing")
    if message.seq_id < 1:
        raise InvalidRequest(f"seq_id: must be at least 1, not {message.seq_id}")
    return message


def canonical_forward_backward(message: pb.ForwardBackwardRequest) -> bytes:
    """The request's one serialised form: equal requests give equal bytes however their own were laid out, so that its
    hash is a fingerprint of the decoded fields."""
    body: bytes = message.SerializeToString(deterministic=True)
    return body


def decode_forward_backward(message: pb.ForwardBackwardRequest) -> ForwardBackward:
    """The internal form of a parsed request. Raises InvalidRequest, naming datum and field."""
    if len(message.data) > MAX_DATUMS:
        raise InvalidRequest(f"data: {len(message.data)} datums exceed the limit of {MAX_DATUMS}")
    _refuse_unknown(message, "forward_backward")
    sparse = _SparseBudget()
    return ForwardBackward(
        model_id=message.model_id,
        seq_id=message.seq_id,
        data=[_datum(datum, f"data[{i}]", sparse) for i, datum in enumerate(message.data)],
        loss_fn=message.loss_fn,
        loss_config=_loss_config(message),
        forward_only=message.forward_only,
    )


class _SparseBudget:
    """What the dense forms of all sparse arrays of a request may still hold."""

    def __init__(self) -> None:
        self._left = MAX_TENSOR_ELEMENTS

    def take(self, shape: Sequence[int], where: str) -> None:
        """Before an array is made dense. Raises InvalidRequest when it is too much."""
        self._left -= _extent(shape)
        if self._left < 0:
            limit = MAX_TENSOR_ELEMENTS
            raise InvalidRequest(f"{where}.shape: all sparse arrays up to this one exceed {limit} values")


def _loss_config(message: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        kind = value.WhichOneof("value")
        if kind is None:
            raise InvalidRequest(f"loss_fn_config[{name!r}]: has no value")
        config[name] = value.number if kind == "number" else value.text
    return config


def _datum(datum: pb.Datum, where: str, sparse: _SparseBudget) -> Datum:
    _refuse_unknown(datum, where)
    parts = []
    for i, chunk in enumerate(datum.model_input):
        _refuse_unknown(chunk, f"{where}.model_input.chunks[{i}]")
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            name = kind or "unknown"
            raise InvalidRequest(f"{where}.model_input.chunks[{i}]: {name} chunks are not supported, only encoded_text")
        text = chunk.encoded_text
        _refuse_unknown(text, f"{where}.model_input.chunks[{i}]")
        raw = text.tokens
        if len(raw) % 4:
            raise InvalidRequest(f"{where}.model_input.chunks[{i}].tokens: {len(raw)} bytes are not whole int32 values")
        parts.append(np.frombuffer(raw, "<i4"))
    tokens = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, np.int32)
    inputs = {
        name: _tensor(tensor, f"{where}.loss_fn_inputs[{name!r}]", sparse)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    targets = inputs.get("target_tokens")
    n_targets = len(tokens) if targets is None or targets.ndim == 0 else len(targets)
    if bool(datum.model_input_spans) != bool(datum.loss_fn_input_spans):
        missing = "loss_fn_input_spans" if datum.model_input_spans else "model_input_spans"
        raise InvalidRequest(f"{where}.{missing}: missing; provenance is given for both fields or for neither")
    return Datum(
        tokens=tokens,
        inputs=inputs,
        model_input_spans=_spans(datum.model_input_spans, len(tokens), f"{where}.model_input_spans"),
        loss_fn_input_spans=_spans(datum.loss_fn_input_spans, n_targets, f"{where}.loss_fn_input_spans"),
    )


def _spans(spans: Sequence[pb.ProvenanceSpan], n: int, where: str) -> Sequence[ProvenanceSpan]:
    """Spans that tile `n` positions, or none at all (WIRE §4)."""
    if not spans:
        return ()
    found = []
    for i, message in enumerate(spans):
        _refuse_unknown(message, f"{where}[{i}]")
        kind = message.WhichOneof("span")
        if kind is None:
            raise InvalidRequest(f"{where}[{i}]: is neither prompt_tokens nor sampled_tokens")
        span = message.sampled_tokens if kind == "sampled_tokens" else message.prompt_tokens
        _refuse_unknown(span, f"{where}[{i}]")
        if not span.sequence_id:
            raise InvalidRequest(f"{where}[{i}].sequence_id: missing")
        if span.offset < 0 or span.length < 0:
            raise InvalidRequest(f"{where}[{i}]: offset {span.offset} and length {span.length} must not be negative")
        found.append(ProvenanceSpan(kind == "sampled_tokens", span.sequence_id, span.offset, span.length))
    if (total := sum(span.length for span in found)) != n:
        raise InvalidRequest(f"{where}: cover {total} positions, but there are {n}")
    return found


def _tensor(tensor: pb.Tensor, where: str, sparse: _SparseBudget) -> np.ndarray:
    _refuse_unknown(tensor, where)
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"{where}.dtype: only float32 and int64 are supported")
    shape = tuple(tensor.shape)
    if len(shape) > MAX_DIMENSIONS:
        raise InvalidRequest(f"{where}.shape: {len(shape)} dimensions exceed the limit of {MAX_DIMENSIONS}")
    if (shape and min(shape) < 0) or _extent(shape) > MAX_TENSOR_ELEMENTS:
        raise InvalidRequest(f"{where}.shape: {list(shape)} is not a usable shape")
    if tensor.HasField("sparse_csr"):
        _refuse_unknown(tensor.sparse_csr, where)
        sparse.take(shape, where)
        return _csr(tensor.sparse_csr, dtype, shape, where)
    raw = tensor.dense
    if len(raw) % dtype.itemsize:
        raise InvalidRequest(f"{where}: {len(raw)} bytes are not whole {dtype.name} values")
    array = np.frombuffer(raw, dtype)
    if not shape:
        return array
    if array.size != math.prod(shape):
        raise InvalidRequest(f"{where}: {array.size} values do not fill the shape {list(shape)}")
    return array.reshape(shape)


def _extent(shape: Sequence[int]) -> int:
    """Number of values of a shape. A size of 0 counts as 1, so that it makes no other dimension usable."""
    return math.prod(max(1, abs(n)) for n in shape[:MAX_DIMENSIONS])


def _csr(csr: pb.SparseCsr, dtype: np.dtype, shape: tuple[int, ...], where: str) -> np.ndarray:
    if len(shape) != 2:
        raise InvalidRequest(f"{where}.shape: a sparse array needs two dimensions, not {list(shape)}")
    if len(csr.crow_indices) % 8 or len(csr.col_indices) % 8 or len(csr.values) % dtype.itemsize:
        raise InvalidRequest(f"{where}: the sparse arrays are not whole values")
    crow, col = np.frombuffer(csr.crow_indices, "<i8"), np.frombuffer(csr.col_indices, "<i8")
    values = np.frombuffer(csr.values, dtype)
    rows, columns = shape
    if crow.size != rows + 1 or col.size != values.size or crow[0] != 0 or crow[-1] != col.size:
        raise InvalidRequest(f"{where}: the sparse row and column indices do not fit the shape {list(shape)}")
    counts = np.diff(crow)
    if (counts < 0).any() or (col.size and not (col.min() >= 0 and col.max() < columns)):
        raise InvalidRequest(f"{where}: a sparse index lies outside the shape {list(shape)}")
    dense = np.zeros(shape, dtype)
    dense[np.repeat(np.arange(rows), counts), col] = values
    return dense


def _refuse_unknown(message: Message, where: str) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequest(f"{where}: unknown protobuf field number {unknown[0].field_number}")


def encode_output(output: ForwardBackwardOutput) -> bytes:
    """The protobuf result. Datums keep request order; a new record starts where a trailing shape changes."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=output.metrics)
    for group in _same_shapes(output.loss_fn_outputs):
        record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(group))
        for name, first in group[0].items():
            arrays = [np.ascontiguousarray(datum[name], "<f4") for datum in group]
            ends = np.cumsum([0] + [array.nbytes for array in arrays], dtype="<i8")
            field = record.fields[name]
            field.data = b"".join(array.tobytes() for array in arrays)
            field.offsets = ends.tobytes()
            field.dtype = pb.DTYPE_FLOAT32
            field.trailing_shape.extend(first.shape[1:])
    payload: bytes = message.SerializeToString()
    return payload


def _same_shapes(datums: Sequence[Mapping[str, np.ndarray]]) -> list[list[Mapping[str, np.ndarray]]]:
    groups: list[list[Mapping[str, np.ndarray]]] = []
    last = None
    for datum in datums:
        shapes = {name: array.shape[1:] for name, array in datum.items()}
        if shapes != last:
            groups.append([])
            last = shapes
        groups[-1].append(datum)
    return groups
