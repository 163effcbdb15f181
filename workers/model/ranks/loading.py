"""Loads a base model that is spread over ranks. No rank ever has the whole model on its device.

Where the files hold the parameters as the model has them, each rank reads its own rows of each, and nothing else. Where
transformers has to convert them (it stacks the experts of most mixtures), rank 0 lets it do so in its host's memory and
hands out one parameter after the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from workers.model.base import BaseModel
from workers.model.parallel import empty_model, spread_over
from workers.model.ranks.group import RankGroup
from workers.model.ranks.messages import Message

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Place(NamedTuple):
    """Where a tensor of the checkpoint belongs: an entry of a module's parameters or buffers."""

    name: str
    module: nn.Module
    entry: str

    @property
    def tensor(self) -> Tensor:
        """What is there now."""
        found: Tensor = getattr(self.module, self.entry)
        return found


def load_spread(name_or_path: str, dtype: torch.dtype, group: RankGroup) -> BaseModel:
    """The base model, spread over the ranks of `group`, all of which call this. Rank 0 shows a progress bar if it has a
    terminal. Raises `UnsupportedModel`.
    """
    model = empty_model(name_or_path, dtype)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tensors = (*model.named_parameters(), *model.named_buffers())
    names = {id(tensor): name for name, tensor in tensors if name in shapes}
    converted = bool(get_model_conversion_mapping(model, add_legacy=False))
    base = BaseModel(model, name_or_path, weights_come_later=True)
    places = list(_places(base, names))
    spread_over(group.mesh, base, group.device)
    source: Source
    files = None if converted else _files(name_or_path)
    if _all_ranks_agree(group, files is not None and files.hold({p.name: shapes[p.name] for p in places})):
        assert files is not None
        source = files
    else:
        source = FirstRank(name_or_path, dtype, group)
    with torch.no_grad(), closing(source):
        for place in tqdm(places, desc=f"Loading {name_or_path}", unit="tensor", disable=group.rank != 0 or None):
            tensor = place.tensor
            shard = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            source.fill(place.name, tuple(tensor.shape), shard, _first_row(tensor))
    base.check_hidden_leads_to_logits()
    base.release()
    return base


def _places(base: BaseModel, names: dict[int, str]) -> Iterator[Place]:
    """Everything of the text model that the checkpoint holds, each tensor once."""
    seen: set[int] = set()
    for part in (base.backbone, base.lm_head):
        for module in part.modules():
            for entry, tensor in {**module._parameters, **module._buffers}.items():
                if tensor is not None and id(tensor) in names and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield Place(names[id(tensor)], module, entry)


def _first_row(tensor: Tensor) -> int:
    if not isinstance(tensor, DTensor):
        return 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return int(offset[0])


def _all_ranks_agree(group: RankGroup, yes: bool) -> bool:
    """Rank 0 decides."""
    if group.rank == 0:
        group.tell(Message("files", {"yes": yes}))
        return yes
    return bool(group.hear().fields["yes"])


class Source(Protocol):
    """Where weights come from. All ranks ask for the same tensors in the same order."""

    def fill(self, name: str, shape: tuple[int, ...], shard: Tensor, first: int) -> None:
        """Write this rank's rows, from `first` on, of the tensor `name` of that shape into `shard`."""

    def close(self) -> None:
        """Let go of what it holds."""


class Files(ExitStack):
    """Safetensors files that hold parameters as the model has them."""

    def __init__(self, paths: dict[str, Path]) -> None:
        """`paths`: the file of each tensor."""
        super().__init__()
        self._paths = paths
        self._open = {path: self.enter_context(safe_open(path, "pt")) for path in sorted(set(paths.values()))}

    def hold(self, shapes: dict[str, tuple[int, ...]]) -> bool:
        """Whether all these tensors are there, in these shapes."""
        return all(name in self._paths and self._shape(name) == shape for name, shape in shapes.items())

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open[self._paths[name]].get_slice(name).get_shape())

    def fill(self, name: str, shape: tuple[int, ...], shard: Tensor, first: int) -> None:
        """Read them."""
        file = self._open[self._paths[name]]
        if not shard.numel():
            return
        shard.copy_(file.get_slice(name)[first : first + len(shard)] if shape else file.get_tensor(name))


def _files(name_or_path: str) -> Files | None:
    """The checkpoint's files, fetched if need be; None if it has none that are safetensors."""
    folder = Path(name_or_path)
    if not folder.is_dir():
        folder = Path(snapshot_download(name_or_path, allow_patterns=["*.safetensors", INDEX]))
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        return Files({name: folder / file for name, file in index.items()})
    if not (folder / SINGLE).is_file():
        return None
    with safe_open(folder / SINGLE, "pt") as file:
        return Files(dict.fromkeys(file.keys(), folder / SINGLE))


class FirstRank:
    """Rank 0 has the whole model in its host's memory and broadcasts it, one tensor at a time."""

    def __init__(self, name_or_path: str, dtype: torch.dtype, group: RankGroup) -> None:
        self._group = group
        self._tensors: dict[str, Tensor] = {}
        if group.rank == 0:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
            self._tensors = model.state_dict()

    def close(self) -> None:
        """Free the model."""
        self._tensors = {}

    def fill(self, name: str, shape: tuple[int, ...], shard: Tensor, first: int) -> None:
        """Take them out of what is broadcast."""
        whole = torch.empty(shape, dtype=shard.dtype, device=self._group.device)
        if self._group.rank == 0:
            whole.copy_(self._tensors[name])
        dist.broadcast(whole, 0)
        shard.copy_(whole[first : first + len(shard)] if shape else whole)
