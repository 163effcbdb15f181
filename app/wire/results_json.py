"""Results of training and sampling as JSON, for clients that do not ask for protobuf (WIRE §11).

What is stored is protobuf; here it becomes the JSON of the same fields, in pieces. Nobody can do anything else in a
process while one piece is written, so none is large, whatever the size of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import orjson

from app.wire import tinker_pb2 as pb
from app.wire.types import NO_TOKEN_LOGPROB

_NUMBERS_AT_ONCE = 1 << 15
_PART_BYTES = 1 << 18

_DTYPES: dict[int, tuple[str, np.dtype]] = {
    pb.DTYPE_FLOAT32: ("float32", np.dtype("<f4")),
    pb.DTYPE_INT64: ("int64", np.dtype("<i8")),
    pb.DTYPE_INT32: ("int64", np.dtype("<i4")),
}
_STOP_REASONS = {pb.STOP_REASON_STOP: "stop", pb.STOP_REASON_LENGTH: "length"}


def forward_backward_json(payload: bytes) -> list[bytes]:
    """A stored `ForwardBackwardOutput` as JSON. Numbers that are none are the texts "NaN" and "Infinity": JSON has no
    others that the SDK would read as numbers again."""
    message = pb.ForwardBackwardOutput.FromString(payload)
    pieces = [b'{"loss_fn_output_type":', orjson.dumps(message.loss_fn_output_type), b',"loss_fn_outputs":[']
    pieces += _separated(datum for record in message.loss_fn_outputs for datum in _datums(record))
    metrics = {name: value if np.isfinite(value) else _name(value) for name, value in message.metrics.items()}
    return _parts([*pieces, b'],"metrics":', orjson.dumps(metrics), b"}"])


def sample_json(payload: bytes) -> list[bytes]:
    """A stored `SampleResponse` as JSON. Prompt logprobs that were not computed are null, rows of a top-k that say
    nothing too."""
    message = pb.SampleResponse.FromString(payload)
    pieces = [b'{"type":"sample","sequences":[', *_separated(map(_sequence, message.sequences)), b"]"]
    if message.prompt_logprobs:
        logprobs = np.frombuffer(message.prompt_logprobs, "<f4")
        pieces += [b',"prompt_logprobs":', *_numbers(logprobs)]
    if message.HasField("topk_prompt_logprobs"):
        pieces += [b',"topk_prompt_logprobs":', *_topk(message.topk_prompt_logprobs)]
    if message.HasField("target_prompt_logprobs"):
        pieces += [b',"target_prompt_logprobs":', *_tensor(message.target_prompt_logprobs)]
    if message.HasField("prompt_alt_tokens"):
        alternatives = message.prompt_alt_tokens
        pieces += [b',"prompt_alt_tokens":{"tokens":', *_tensor(alternatives.tokens)]
        pieces += [b',"logprobs":', *_tensor(alternatives.logprobs), b"}"]
    return _parts([*pieces, b',"prompt_cache_hit_tokens":', orjson.dumps(message.prompt_cache_hit_tokens), b"}"])


def _sequence(sequence: pb.SampledSequence) -> list[bytes]:
    pieces = [b'{"stop_reason":', orjson.dumps(_STOP_REASONS[sequence.stop_reason])]
    pieces += [b',"tokens":', *_numbers(np.frombuffer(sequence.tokens, "<i4"))]
    if sequence.HasField("logprobs"):
        pieces += [b',"logprobs":', *_numbers(np.frombuffer(sequence.logprobs, "<f4"))]
    if sequence.HasField("topk_sampled_logprobs"):
        pieces += [b',"topk_logprobs":', *_topk(sequence.topk_sampled_logprobs)]
    return [*pieces, b"}"]


def _datums(record: pb.ArrayRecord) -> Iterator[list[bytes]]:
    """The datums of a record, each its arrays by name."""
    fields = [_Field.of(name, record.fields[name]) for name in sorted(record.fields)]
    for i in range(record.num_datums):
        yield [b"{", *_separated([orjson.dumps(field.name), b":", *field.datum(i)] for field in fields), b"}"]


@dataclass(frozen=True, slots=True)
class _Field:
    """One array of all datums of a record. Every access to a message's bytes copies them, so it is made once."""

    name: str
    dtype: str
    values: np.ndarray
    ends: list[int]
    trailing: tuple[int, ...]

    @classmethod
    def of(cls, name: str, field: pb.BatchedTensor) -> _Field:
        dtype_name, dtype = _DTYPES[field.dtype]
        ends = (np.frombuffer(field.offsets, "<i8") // dtype.itemsize).tolist()
        return cls(name, dtype_name, np.frombuffer(field.data, dtype), ends, tuple(field.trailing_shape))

    def datum(self, i: int) -> list[bytes]:
        """The `i`-th datum's array."""
        values = self.values[self.ends[i] : self.ends[i + 1]]
        rows = values.size // max(1, math.prod(self.trailing))
        return _array(values, self.dtype, [rows, *self.trailing])


def _tensor(tensor: pb.Tensor) -> list[bytes]:
    name, dtype = _DTYPES[tensor.dtype]
    if tensor.WhichOneof("encoding") != "sparse_csr":
        return _array(np.frombuffer(tensor.dense, dtype), name, list(tensor.shape))
    csr = tensor.sparse_csr
    pieces = _array(np.frombuffer(csr.values, dtype), name, list(tensor.shape))[:-1]
    pieces += [b',"sparse_crow_indices":', *_numbers(np.frombuffer(csr.crow_indices, "<i8"))]
    return [*pieces, b',"sparse_col_indices":', *_numbers(np.frombuffer(csr.col_indices, "<i8")), b"}"]


def _array(values: np.ndarray, dtype: str, shape: list[int]) -> list[bytes]:
    """A TensorData of these values, which lie in a row."""
    head = orjson.dumps({"dtype": dtype, "shape": shape})[:-1]
    return [head, b',"data":', *_numbers(values, texts=True), b"}"]


def _numbers(array: np.ndarray, *, texts: bool = False) -> list[bytes]:
    """A 1-D array as a JSON list. What is no finite number becomes null or, with `texts`, its name."""
    parts = []
    for start in range(0, array.size, _NUMBERS_AT_ONCE):
        part = array[start : start + _NUMBERS_AT_ONCE]
        if texts and part.dtype.kind == "f" and not np.isfinite(part).all():
            values = [value if np.isfinite(value) else _name(value) for value in part.tolist()]
            parts.append([orjson.dumps(values)[1:-1]])
        else:
            parts.append([orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]])
    return [b"[", *_separated(parts), b"]"]


def _topk(topk: pb.TopkLogprobs) -> list[bytes]:
    """Rows of [token, logprob] pairs; null for a row without any."""
    tokens = np.frombuffer(topk.token_ids, "<i4").reshape(topk.length, topk.k)
    logprobs = np.frombuffer(topk.logprobs, "<f4").reshape(topk.length, topk.k)
    rows_at_once = max(1, _NUMBERS_AT_ONCE // max(1, topk.k) // 4)
    parts = []
    for start in range(0, topk.length, rows_at_once):
        block = slice(start, start + rows_at_once)
        used = (tokens[block] != 0) | (logprobs[block] != np.float32(NO_TOKEN_LOGPROB))
        ids, values, counts = tokens[block].tolist(), logprobs[block].tolist(), used.sum(1).tolist()
        rows = [
            list(zip(ids[i][:count], values[i][:count], strict=True)) if count else None
            for i, count in enumerate(counts)
        ]
        parts.append([orjson.dumps(rows)[1:-1]])
    return [b"[", *_separated(parts), b"]"]


def _separated(parts: Iterable[list[bytes]]) -> list[bytes]:
    """All pieces of all parts, with commas between the parts."""
    pieces: list[bytes] = []
    for part in parts:
        if pieces:
            pieces.append(b",")
        pieces += part
    return pieces


def _parts(pieces: list[bytes]) -> list[bytes]:
    """The same bytes in fewer pieces, each large enough to be worth sending and small enough to be joined at once."""
    parts, first, size = [], 0, 0
    for end, piece in enumerate(pieces, 1):
        size += len(piece)
        if size >= _PART_BYTES or end == len(pieces):
            parts.append(b"".join(pieces[first:end]))
            first, size = end, 0
    return parts


def _name(value: float) -> str:
    if np.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
