"""An adapter merged into its base model: W + scale · B A, for each layer that it trains.

The base model's files are read as they are and written with their own names, shapes and dtypes, so that whatever loads
the base loads the merged model. Transformers says which of its parameters a name in a file means, and which part of a
stack of experts: files of most mixtures have every expert's projections by themselves. Sums are made in float32 and
rounded once, to the dtype of the file.

Letters in shapes: I inputs and O outputs of a layer, R rank, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from workers.model.adapter import Adapter
from workers.model.base import BaseModel
from workers.model.experts import LoraExperts
from workers.model.weight_files import DTYPES, PIECE_BYTES, NewTensor, StoredTensor


class CannotMerge(ValueError):
    """The files of the base model are not what the adapter can be added to; the message says why."""


@dataclass(frozen=True, slots=True)
class Addend:
    """What is added to a matrix: `left` [rows, R] times `right` [R, columns], float32, the scale included."""

    left: Tensor
    right: Tensor


class NamesInFiles:
    """What the tensors of a checkpoint are in the model. `model`: before adapters are installed in it."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._prefix = model.base_model_prefix
        self._known = dict.fromkeys(model.state_dict(), True)

    def find(self, name: str) -> tuple[str, WeightConverter | None, str]:
        """The parameter that the tensor `name` is (a part of); the converter that makes it of several tensors, if it
        is a part, and which of the converter's sources it is."""
        found, source = rename_source_key(name, self._renamings, self._converters, self._prefix, self._known)
        if found not in self._known and name in self._known:
            found, source = rename_source_key(name, [], [], self._prefix, self._known)
        if source is None:
            return str(found), None, ""
        return str(found), next(one for one in self._converters if source in one.source_patterns), source


@dataclass(frozen=True, slots=True)
class Merged:
    """The tensors of the merged model. `untied`: its unembedding is not the embedding any more."""

    tensors: Sequence[NewTensor]
    untied: bool

    @property
    def size(self) -> int:
        """Bytes of all."""
        return sum(tensor.size for tensor in self.tensors)


def merged(base: BaseModel, names: NamesInFiles, stored: Sequence[StoredTensor], adapter: Adapter) -> Merged:
    """The tensors of `base`, whose checkpoint is `stored`, with those of `adapter` added to them. A trained unembedding
    that was tied to the embedding gets a weight of its own.

    Nothing is computed before it is written. Raises CannotMerge, also if a layer of the adapter is in no file.
    """
    head = next(path for path, target in base.targets.items() if target.group == "unembed")
    untied = base.tied and head in adapter.modules
    embedding = f"{_path_of(base, base.model.get_input_embeddings())}.weight"
    left = {path: math.prod(base.targets[path].shape) for path in adapter.modules}
    tensors = []
    for tensor in stored:
        name, converter, source = names.find(tensor.name)
        if untied and name == f"{head}.weight":
            continue  # a copy of the embedding, which nobody reads
        if untied and name == embedding:
            addend = _whole(adapter, head)
            tensors += [_unchanged(tensor), _changed(tensor, [addend], name=f"{head}.weight")]
            left.pop(head)
            continue
        path = name if name in adapter.modules else name.removesuffix(".weight")
        if path not in left:
            tensors.append(_unchanged(tensor))
            continue
        addends = _addends(base, adapter, path, converter, source, tensor.name)
        tensors.append(_changed(tensor, addends))
        left[path] -= math.prod(tensor.shape)
    if missing := [path for path, count in left.items() if count]:
        raise CannotMerge(f"the base model's files do not hold {missing[0]} as plain numbers")
    return Merged(tensors, untied)


def _path_of(base: BaseModel, module: torch.nn.Module) -> str:
    path: str = next(path for path, found in base.model.named_modules() if found is module)
    return path


def _whole(adapter: Adapter, path: str) -> Addend:
    a, b = adapter.modules[path]
    return Addend(b.detach().float() * adapter.scale, a.detach().float())


def _addends(
    base: BaseModel, adapter: Adapter, path: str, converter: WeightConverter | None, source: str, name: str
) -> list[Addend]:
    """What is added to the matrices of the tensor `name`, which is the layer `path` or a part of it."""
    if base.targets[path].experts is None:
        if converter is not None:
            raise CannotMerge(f"the base model's files hold {path} in a form that is not known here, as {name!r}")
        return [_whole(adapter, path)]
    a_ERI, b_EOR = (factor.detach().float() for factor in adapter.modules[path])
    if converter is not None:
        expert, rows = _part(converter, source, name, b_EOR.shape[1])
        return [Addend(b_EOR[expert, rows] * adapter.scale, a_ERI[expert])]
    holder = base.model.get_submodule(path.rpartition(".")[0])
    assert isinstance(holder, LoraExperts)
    if holder.experts.is_transposed:
        return [Addend(a.mT, b.mT * adapter.scale) for a, b in zip(a_ERI, b_EOR, strict=True)]
    return [Addend(b * adapter.scale, a) for a, b in zip(a_ERI, b_EOR, strict=True)]


def _part(converter: WeightConverter, source: str, name: str, out_features: int) -> tuple[int, slice]:
    """Which expert's projection the tensor `name` is, and which rows of the stack's matrix of that expert."""
    match = re.search(re.escape(source).replace(r"\*", r"(\d+)"), name)
    operations = converter.operations
    is_stack = isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
    joins_rows = len(operations) == 1 or (isinstance(operations[1], Concatenate) and operations[1].dim == 1)
    if match is None or not match.groups() or not is_stack or not joins_rows or len(operations) > 2:
        raise CannotMerge(f"the base model's files hold experts in a form that is not known here, as {name!r}")
    count = len(converter.source_patterns)
    size, place = out_features // count, converter.source_patterns.index(source)
    return int(match[1]), slice(place * size, (place + 1) * size)


def _unchanged(tensor: StoredTensor) -> NewTensor:
    return NewTensor(tensor.name, tensor.dtype, tensor.shape, tensor.size, tensor.pieces)


def _changed(tensor: StoredTensor, addends: Sequence[Addend], *, name: str | None = None) -> NewTensor:
    if tensor.dtype not in DTYPES:
        raise CannotMerge(f"the base model's files hold {tensor.name!r} quantized, as {tensor.dtype}")
    matrix = (addends[0].left.shape[0], addends[0].right.shape[1])
    expected = matrix if len(addends) == 1 else (len(addends), *matrix)
    if tensor.shape != expected:
        raise CannotMerge(f"{tensor.name!r} has shape {list(tensor.shape)}, the adapter is for {list(expected)}")
    pieces = partial(_sums, tensor, addends)
    return NewTensor(name or tensor.name, tensor.dtype, tensor.shape, tensor.size, pieces)


def _sums(tensor: StoredTensor, addends: Sequence[Addend]) -> Iterator[memoryview]:
    """The bytes of the tensor with `addends` added to its matrices, some rows at a time."""
    dtype = DTYPES[tensor.dtype]
    place = 0
    for addend in addends:
        columns = addend.right.shape[1]
        row_bytes = columns * dtype.itemsize
        for left in addend.left.split(max(1, PIECE_BYTES // row_bytes)):
            size = len(left) * row_bytes
            data = bytearray().join(tensor.read(place, place + size))
            rows = torch.frombuffer(data, dtype=dtype).view(len(left), columns)
            summed = torch.addmm(rows.float(), left, addend.right).to(dtype)
            yield summed.view(-1).view(torch.uint8).numpy().data
            place += size
