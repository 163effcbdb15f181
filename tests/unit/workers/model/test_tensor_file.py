"""Files written tensor by tensor are those that safetensors makes of all tensors at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.model.tensor_file import write_tensors

SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=3)


@given(
    shapes=st.dictionaries(st.text('abcß"\\._/', min_size=1, max_size=9), SHAPES, min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    metadata=st.sampled_from([None, {"format": "pt"}]),
)
def test_the_bytes_are_those_of_the_library(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: dict[str, list[int]],
    dtype: torch.dtype,
    metadata: dict[str, str] | None,
) -> None:
    tensors = {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}
    path = tmp_path_factory.getbasetemp() / "file.safetensors"
    write_tensors(path, tensors, lambda name, tensor: tensor, metadata)
    assert path.read_bytes() == safetensors.torch.save(tensors, metadata)


def test_tensors_are_packed_one_by_one(tmp_path: Path) -> None:
    views = {"b": torch.randn(6, 4).t(), "a": torch.randn(2, 3, 4).permute(1, 2, 0)}
    write_tensors(tmp_path / "f", views, lambda name, tensor: tensor.flatten(1) if name == "a" else tensor, None)
    expected = {"a": views["a"].flatten(1).contiguous(), "b": views["b"].contiguous()}
    assert (tmp_path / "f").read_bytes() == safetensors.torch.save(expected)
