"""Safetensors files written piece by piece: a few megabytes of one are in memory beside the tensors themselves.

The format (https://github.com/huggingface/safetensors#format): the length of the header as 8 bytes, little-endian; the
header, JSON, padded with spaces to a multiple of 8; the tensors one after another. The library's own `save_file` wants
all of them contiguous at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_PIECE_BYTES = 8 * 2**20
Pack = Callable[[str, Tensor], Tensor]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], pack: Pack, metadata: Mapping[str, str] | None) -> None:
    """Write `pack(name, tensor)` of each of the tensors, all of one dtype: byte for byte what `safetensors.torch.save`
    makes of them. `pack` changes shape and strides, and copies only where it has to."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata is not None else {}
    place = 0
    for name in sorted(tensors):
        packed = pack(name, torch.empty_like(tensors[name], device="meta"))
        size = packed.numel() * packed.element_size()
        offsets = [place, place + size]
        header[name] = {"dtype": _NAMES[packed.dtype], "shape": list(packed.shape), "data_offsets": offsets}
        place += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in sorted(tensors):
            packed = pack(name, tensors[name].detach().cpu())
            row_bytes = packed.element_size() * packed[0].numel() if packed.numel() else 1
            for rows in packed.split(max(1, _PIECE_BYTES // row_bytes)):
                file.write(rows.contiguous().view(-1).view(torch.uint8).numpy().data)
