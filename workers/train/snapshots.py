"""Snapshots: a run's state, to files and back (SEMANTICS §7). `snapshot_files` says how these are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
import torch
from safetensors.torch import load, save, save_file
from torch import Tensor

from app.storage.blobs import BlobStore, new_blob_id
from workers import snapshot_files
from workers.model.adamw import AdamState
from workers.model.adapter import HostCopy
from workers.model.base import BaseModel
from workers.model.export import load_peft, peft_files, write_peft
from workers.model.lora import Adapter
from workers.model.optim import fresh_state
from workers.snapshot_files import ADAPTER_FILES, BadSnapshot, Content, NewerSnapshot, read, size_of
from workers.train.slots import Counters, RunState

STATE_FORMAT = 2
"""The newest format of `state.json` that this release reads. A file says the oldest that can hold it, so that older
releases read what they can: 1 holds AdamW's state, 2 that of any optimizer."""
OPTIMIZER_FILE = "optimizer.safetensors"
Kind = Literal["state", "adapter", "external"]


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """A snapshot on its way to the blob store: files by name, in host memory or on the disk."""

    id: str
    kind: Kind
    files: Mapping[str, Content]

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(size_of(data) for data in self.files.values())


def adapter_files(
    adapter: Adapter | HostCopy, base: BaseModel, snapshot_id: str | None = None, *, folder: Path | None = None
) -> SnapshotFiles:
    """What a sampler loads; with `folder`, in that and not in memory."""
    return SnapshotFiles(snapshot_id or new_blob_id(), "adapter", _peft(adapter, base, folder))


def _peft(adapter: Adapter | HostCopy, base: BaseModel, folder: Path | None) -> dict[str, Content]:
    if folder is None:
        return dict(peft_files(adapter, base.name_or_path, base))
    return dict(write_peft(adapter, base.name_or_path, base, folder))


@dataclass(frozen=True, slots=True)
class StateCopy:
    """A run's state as it was, in host memory."""

    adapter: HostCopy
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def copy_state(state: RunState, base: BaseModel, *, seq_id: int) -> StateCopy:
    """Copy all that training resumes from: adapter, optimizer, pending gradients, counters."""
    tensors = state.optimizer.tensors()
    if state.adapter.has_grad:
        tensors["grad"] = state.adapter.grad_flat
    facts = {
        "format": 1 if state.optimizer.kind == AdamState.kind else 2,
        "base_model_hash": base.facts.config_hash,
        "seq_id": seq_id,
        "optimizer": state.optimizer.kind,
        "step": state.optimizer.step,
        "counters": asdict(state.counters),
        "torch": torch.__version__,
    }
    copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    return StateCopy(HostCopy(state.adapter), copies, facts)


def state_files(
    copy: StateCopy, base: BaseModel, snapshot_id: str | None = None, *, folder: Path | None = None
) -> SnapshotFiles:
    """All that training resumes from; with `folder`, in that and not in memory."""
    files = _peft(copy.adapter, base, folder)
    tensors = {name: tensor.contiguous() for name, tensor in copy.tensors.items()}
    if folder is None:
        files[OPTIMIZER_FILE] = save(tensors)
    else:
        save_file(tensors, folder / OPTIMIZER_FILE)
        files[OPTIMIZER_FILE] = folder / OPTIMIZER_FILE
    files["state.json"] = orjson.dumps(copy.facts, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
    return SnapshotFiles(snapshot_id or new_blob_id(), "state", files)


def write(blobs: BlobStore, snapshot: SnapshotFiles) -> None:
    """Write the files of a snapshot."""
    snapshot_files.write(blobs, snapshot.id, snapshot.files)


def read_adapter_folder(folder: Path, base: BaseModel) -> Adapter:
    """The adapter whose files are in `folder`. Raises BadSnapshot."""
    try:
        files = {name: (folder / name).read_bytes() for name in ADAPTER_FILES}
    except FileNotFoundError as error:
        raise BadSnapshot(f"the checkpoint has no {error.filename and Path(error.filename).name}") from error
    return _adapter(files, base)


def read_adapter(blobs: BlobStore, snapshot_id: str, base: BaseModel) -> Adapter:
    """The adapter of a snapshot of either kind. Raises BadSnapshot."""
    return _adapter(read(blobs, snapshot_id), base)


def read_state(blobs: BlobStore, snapshot_id: str, base: BaseModel, kind: str, *, optimizer: bool) -> RunState:
    """The state of a run, from the blob store. See `state_of_files`."""
    return state_of_files(read(blobs, snapshot_id), base, kind, optimizer=optimizer)


def state_of_files(files: Mapping[str, bytes], base: BaseModel, kind: str, *, optimizer: bool) -> RunState:
    """The state of a run whose optimizer is `kind`; without `optimizer` a fresh one of it and no pending gradient.

    Raises BadSnapshot.
    """
    adapter = _adapter(files, base)
    if not optimizer:
        return RunState(adapter, fresh_state(kind, adapter))
    if "state.json" not in files:
        raise BadSnapshot("the checkpoint has no optimizer state")
    facts = orjson.loads(files["state.json"])
    if facts["format"] > STATE_FORMAT:
        raise NewerSnapshot("the checkpoint was written by a newer release")
    if facts["base_model_hash"] != base.facts.config_hash:
        raise BadSnapshot("the checkpoint belongs to another base model")
    if facts["optimizer"] != kind:
        raise BadSnapshot(f"the checkpoint's optimizer is {facts['optimizer']}, not {kind}")
    tensors = load(files[OPTIMIZER_FILE])
    if any(tensor.shape != adapter.flat.shape for tensor in tensors.values()):
        raise BadSnapshot("the checkpoint's optimizer state does not fit its adapter")
    state = fresh_state(kind, adapter)
    for name, tensor in state.tensors().items():
        if name not in tensors:
            raise BadSnapshot(f"the checkpoint's optimizer state lacks {name!r}")
        tensor.copy_(tensors[name])
    state.step = facts["step"]
    if "grad" in tensors:
        adapter.add_grad(tensors["grad"])
    return RunState(adapter, state, Counters(**facts["counters"]))


def _adapter(files: Mapping[str, bytes], base: BaseModel) -> Adapter:
    try:
        return load_peft(base, files)
    except (ValueError, KeyError) as error:
        raise BadSnapshot(f"the checkpoint's adapter does not fit: {error}") from error
