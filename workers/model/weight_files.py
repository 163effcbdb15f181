"""Folders of safetensors files, read and written tensor by tensor: a few megabytes are in memory at a time.

The format is described in `tensor_file`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PIECE_BYTES = 4 * 2**20
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Plain floats, by the format's names for them."""
_LARGEST_HEADER = 100 * 2**20
"""What the library accepts."""


class BadWeightFiles(ValueError):
    """The folder holds no weights that can be read; the message says what is wrong."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: `size` bytes from `start` on. `dtype`: by the format's name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    size: int

    def pieces(self) -> Iterator[bytes]:
        """Its bytes."""
        yield from self.read(0, self.size)

    def read(self, start: int, stop: int) -> Iterator[bytes]:
        """Some of its bytes. Raises BadWeightFiles where the file ends before them."""
        with self.path.open("rb") as file:
            file.seek(self.start + start)
            left = stop - start
            while left:
                piece = file.read(min(left, PIECE_BYTES))
                if not piece:
                    raise BadWeightFiles(f"{self.path.name} was cut off")
                left -= len(piece)
                yield piece


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to be written: `pieces` gives its bytes, one after another."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    pieces: Callable[[], Iterator[bytes | memoryview]]


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """All tensors of the checkpoint in `folder`, file by file, as they lie there. Raises BadWeightFiles."""
    if (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        names = sorted(set(weight_map.values()))
    elif (folder / SINGLE).is_file():
        weight_map, names = None, [SINGLE]
    else:
        raise BadWeightFiles(f"{folder} has neither {INDEX} nor {SINGLE}")
    found = [tensor for name in names for tensor in _tensors_of(folder / name)]
    if weight_map is not None:
        found = [tensor for tensor in found if weight_map.get(tensor.name) == tensor.path.name]
        if missing := weight_map.keys() - {tensor.name for tensor in found}:
            raise BadWeightFiles(f"{folder} lacks {min(missing)!r}, which its index names")
    return found


def read_tensor(stored: StoredTensor) -> Tensor:
    """The whole tensor. Raises BadWeightFiles for a dtype that is no plain float."""
    if stored.dtype not in DTYPES:
        raise BadWeightFiles(f"{stored.name!r} is quantized, as {stored.dtype}")
    data = bytearray().join(stored.pieces())
    return torch.frombuffer(data, dtype=DTYPES[stored.dtype]).view(stored.shape)


def _tensors_of(path: Path) -> list[StoredTensor]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length < _LARGEST_HEADER:
                raise ValueError("its header has no sane length")
            header: dict[str, Any] = json.loads(file.read(length))
    except (OSError, ValueError) as error:
        raise BadWeightFiles(f"{path.name}: {error}") from error
    found = []
    for name, facts in header.items():
        if name != "__metadata__":
            start, stop = facts["data_offsets"]
            place = 8 + length + start
            found.append(StoredTensor(name, facts["dtype"], tuple(facts["shape"]), path, place, stop - start))
    return sorted(found, key=lambda tensor: tensor.start)


def write_checkpoint(
    folder: Path, tensors: Sequence[NewTensor], *, shard_bytes: int, written: Callable[[int], None]
) -> None:
    """Write the tensors, in their order, into as many files of at most `shard_bytes` (or of one tensor) as it takes,
    and the index if it is more than one. `written` is told how many bytes have been, again and again."""
    shards = _shards(tensors, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(folder / name, shard, written)
        weight_map |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        total = {"total_size": sum(tensor.size for tensor in tensors)}
        total["total_parameters"] = sum(math.prod(tensor.shape) for tensor in tensors)
        index = {"metadata": total, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _shards(tensors: Sequence[NewTensor], shard_bytes: int) -> list[list[NewTensor]]:
    shards: list[list[NewTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.size > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.size
    return shards


def _write_file(path: Path, tensors: Sequence[NewTensor], written: Callable[[int], None]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for tensor in tensors:
        offsets = [place, place + tensor.size]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        place += tensor.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            for piece in tensor.pieces():
                file.write(piece)
                written(len(piece))
