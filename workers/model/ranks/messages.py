"""Messages between ranks: JSON and arrays of numbers in one block of bytes. Nothing here can carry code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

DTYPES = frozenset({"<i4", "<i8", "<f4", "<f8", "|b1"})
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """`kind` and `fields`: what it says, as JSON can hold it. `arrays`: the numbers that go with it."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    arrays: Sequence[np.ndarray] = ()


def encode(message: Message) -> bytes:
    """Length of the header, header, arrays. Raises ValueError for an array of another dtype than `DTYPES`."""
    arrays = [np.ascontiguousarray(array).reshape(array.shape) for array in message.arrays]
    if wrong := {array.dtype.str for array in arrays} - DTYPES:
        raise ValueError(f"a message cannot carry arrays of {min(wrong)}")
    layout = [[array.dtype.str, array.shape] for array in arrays]
    header = json.dumps({"kind": message.kind, "fields": message.fields, "arrays": layout}).encode()
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *(array.tobytes() for array in arrays)])


def decode(data: bytes) -> Message:
    """The message that `encode` wrote."""
    start = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES:start])
    arrays = []
    for dtype, shape in header["arrays"]:
        assert dtype in DTYPES, dtype
        count = int(np.prod(shape, dtype=np.int64))
        arrays.append(np.frombuffer(data, dtype, count, start).reshape(shape).copy())
        start += arrays[-1].nbytes
    return Message(header["kind"], header["fields"], arrays)
