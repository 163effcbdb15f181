"""`forward_backward` and `forward` as JSON, the form of SDKs before 0.25, turned into the protobuf message (WIRE §11).

The message is all that anybody behind this module knows. Here is checked what a message cannot express: types, unknown
fields, numbers beyond their dtype. The rest is checked where every message is, by `app.wire.training` and
`app.runs.checks`, so that both forms are refused in the same words.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from app.errors import InvalidRequest
from app.wire import tinker_pb2 as pb

_DTYPES: dict[str, tuple[pb.DType, np.dtype]] = {
    "float32": (pb.DTYPE_FLOAT32, np.dtype("<f4")),
    "int64": (pb.DTYPE_INT64, np.dtype("<i8")),
}
_TOKENS, _INDICES = np.dtype("<i4"), np.dtype("<i8")


def encode_request(
    data: Mapping[str, Any], *, model_id: str, seq_id: int, forward_only: bool
) -> pb.ForwardBackwardRequest:
    """The message that says what a JSON body says. Raises InvalidRequest, naming datum and field.

    `data` is the body of `forward_backward`, or with `forward_only` that of `forward`; its place in the sequence has
    been read from it before.
    """
    name = "forward_input" if forward_only else "forward_backward_input"
    fields = _fields(data, "", required=("model_id", "seq_id", name))
    batch = _fields(fields[name], name, required=("data", "loss_fn"), optional=("loss_fn_config",))
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, forward_only=forward_only)
    message.loss_fn = _text(batch["loss_fn"], "loss_fn")
    _set_config(message, batch.get("loss_fn_config", {}))
    for i, datum in enumerate(_list(batch["data"], "data")):
        _set_datum(message.data.add(), datum, f"data[{i}]")
    return message


def _set_config(message: pb.ForwardBackwardRequest, config: object) -> None:
    if not isinstance(config, dict):
        raise InvalidRequest("loss_fn_config: must be an object")
    for name, value in config.items():
        if isinstance(value, str):
            message.loss_fn_config_v2[name].text = value
        elif isinstance(value, int | float) and not isinstance(value, bool):
            message.loss_fn_config[name] = _float(value, f"loss_fn_config[{name!r}]")
        else:
            raise InvalidRequest(f"loss_fn_config[{name!r}]: must be a number or a text")


def _set_datum(datum: pb.Datum, value: object, where: str) -> None:
    fields = _fields(value, where, required=("model_input", "loss_fn_inputs"))
    model_input = _fields(fields["model_input"], f"{where}.model_input", required=("chunks",))
    for i, chunk in enumerate(_list(model_input["chunks"], f"{where}.model_input.chunks")):
        _set_chunk(datum.model_input.add(), chunk, f"{where}.model_input.chunks[{i}]")
    inputs = fields["loss_fn_inputs"]
    if not isinstance(inputs, dict):
        raise InvalidRequest(f"{where}.loss_fn_inputs: must be an object")
    for name, tensor in inputs.items():
        _set_tensor(datum.loss_fn_inputs[name], tensor, f"{where}.loss_fn_inputs[{name!r}]")


def _set_chunk(chunk: pb.Chunk, value: object, where: str) -> None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in (None, "encoded_text"):
        raise InvalidRequest(f"{where}: {kind} chunks are not supported, only encoded_text")
    fields = _fields(value, where, required=("tokens",), optional=("type",))
    chunk.encoded_text.tokens = _numbers(fields["tokens"], f"{where}.tokens", _TOKENS).tobytes()


def _set_tensor(tensor: pb.Tensor, value: object, where: str) -> None:
    optional = ("shape", "sparse_crow_indices", "sparse_col_indices")
    fields = _fields(value, where, required=("data", "dtype"), optional=optional)
    known = _DTYPES.get(_text(fields["dtype"], f"{where}.dtype"))
    if known is None:
        raise InvalidRequest(f"{where}.dtype: only float32 and int64 are supported")
    tensor.dtype, dtype = known
    values = _numbers(fields["data"], f"{where}.data", dtype).tobytes()
    if "shape" in fields:
        tensor.shape.extend(_numbers(fields["shape"], f"{where}.shape", _INDICES).tolist())
    rows, columns = fields.get("sparse_crow_indices"), fields.get("sparse_col_indices")
    if rows is None and columns is None:
        tensor.dense = values
        return
    for name, indices in (("sparse_crow_indices", rows), ("sparse_col_indices", columns)):
        if indices is None:
            raise InvalidRequest(f"{where}.{name}: missing; a sparse array has both kinds of indices")
    tensor.sparse_csr.values = values
    tensor.sparse_csr.crow_indices = _numbers(rows, f"{where}.sparse_crow_indices", _INDICES).tobytes()
    tensor.sparse_csr.col_indices = _numbers(columns, f"{where}.sparse_col_indices", _INDICES).tobytes()


def _fields(value: object, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of an object that are not null. Raises InvalidRequest for a missing or an unknown one."""
    if not isinstance(value, Mapping):
        raise InvalidRequest(f"{where or 'body'}: must be an object")
    prefix = f"{where}." if where else ""
    found = {name: item for name, item in value.items() if item is not None}
    for name in required:
        if name not in found:
            raise InvalidRequest(f"{prefix}{name}: missing")
    for name in found:
        if name not in required and name not in optional:
            raise InvalidRequest(f"{prefix}{name}: unknown field")
    return found


def _list(value: object, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{where}: must be a list")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}: must be a text")
    return value


def _float(value: float, where: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidRequest(f"{where}: must be a finite number") from error


def _numbers(value: object, where: str, dtype: np.dtype) -> np.ndarray:
    """A flat list of numbers as a 1-D array of `dtype`, none of them changed by more than its precision."""
    numbers = _list(value, where)
    if not set(map(type, numbers)) <= {int, float}:  # numpy would make a text of every one, as long as the longest
        raise InvalidRequest(f"{where}: must be a flat list of numbers")
    try:
        array = np.array(numbers)
    except OverflowError as error:
        raise InvalidRequest(f"{where}: must be a flat list of numbers") from error
    if array.dtype.kind not in "iuf":
        raise InvalidRequest(f"{where}: must be a flat list of numbers")
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            narrow = array.astype(dtype)
        if (np.isfinite(array) & np.isinf(narrow)).any():
            raise InvalidRequest(f"{where}: a number exceeds {dtype.name}")
        return narrow
    whole = array.dtype.kind != "f" or (np.isfinite(array) & (array == np.trunc(array))).all()
    if not whole:
        raise InvalidRequest(f"{where}: must hold whole numbers")
    limits = np.iinfo(dtype)
    beyond = limits.max + 1 if array.dtype.kind != "f" else float(limits.max + 1)
    if array.size and not (limits.min <= array.min() and array.max() < beyond):
        raise InvalidRequest(f"{where}: a number is no {dtype.name}")
    return array.astype(dtype)
