"""Snapshots: a run's state as files, written whole and read back checked (SEMANTICS §7).

snapshots/<id>/adapter_config.json, adapter_model.safetensors    PEFT's own layout
snapshots/<id>/optimizer.safetensors, state.json                 only of kind "state"
snapshots/<id>/manifest.json                                     sizes and SHA-256 of the others, written last
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

import orjson
import torch
from safetensors.torch import load, save

from app.checkpoints.files import MANIFEST
from app.checkpoints.service import snapshot_folder
from app.storage.blobs import BlobMissing, BlobStore, new_blob_id
from workers.model.adamw import AdamState
from workers.model.base import BaseModel
from workers.model.export import load_peft, peft_files
from workers.model.lora import Adapter
from workers.model.optim import fresh_state
from workers.train.slots import Counters, RunState

STATE_FORMAT = 2
"""The newest format of `state.json` that this release reads. A file says the oldest that can hold it, so that older
releases read what they can: 1 holds AdamW's state, 2 that of any optimizer."""
Kind = Literal["state", "adapter", "external"]


class BadSnapshot(ValueError):
    """A snapshot's files are missing, damaged, of another model or of a newer release."""


@dataclass(frozen=True, slots=True)
class SnapshotFiles:
    """A snapshot on its way to the blob store: files by name, in host memory."""

    id: str
    kind: Kind
    files: Mapping[str, bytes]

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(len(data) for data in self.files.values())


def adapter_files(adapter: Adapter, base: BaseModel) -> SnapshotFiles:
    """What a sampler loads."""
    return SnapshotFiles(new_blob_id(), "adapter", peft_files(adapter, base.name_or_path, base))


def state_files(state: RunState, base: BaseModel, *, seq_id: int) -> SnapshotFiles:
    """All that training resumes from: adapter, optimizer, pending gradients, counters."""
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
    files = dict(peft_files(state.adapter, base.name_or_path, base))
    files["optimizer.safetensors"] = save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})
    files["state.json"] = orjson.dumps(facts, option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS)
    return SnapshotFiles(new_blob_id(), "state", files)


def write(blobs: BlobStore, snapshot: SnapshotFiles) -> None:
    """Write the files, then the manifest: a snapshot without one is none."""
    folder = snapshot_folder(snapshot.id)
    manifest = {}
    for name, data in snapshot.files.items():
        blobs.put(f"{folder}/{name}", data)
        manifest[name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    blobs.put(f"{folder}/{MANIFEST}", orjson.dumps(manifest, option=orjson.OPT_SORT_KEYS))


def read(blobs: BlobStore, snapshot_id: str) -> dict[str, bytes]:
    """All files of a snapshot, checked against its manifest. Raises BadSnapshot."""
    folder = snapshot_folder(snapshot_id)
    try:
        manifest = orjson.loads(blobs.get(f"{folder}/{MANIFEST}"))
        files = {name: blobs.get(f"{folder}/{name}") for name in manifest}
    except BlobMissing as error:
        raise BadSnapshot("the checkpoint's files are not there any more") from error
    for name, data in files.items():
        if len(data) != manifest[name]["size"] or hashlib.sha256(data).hexdigest() != manifest[name]["sha256"]:
            raise BadSnapshot(f"the checkpoint's {name} is damaged")
    return files


def read_adapter(blobs: BlobStore, snapshot_id: str, base: BaseModel) -> Adapter:
    """The adapter of a snapshot of either kind. Raises BadSnapshot."""
    return _adapter(read(blobs, snapshot_id), base)


def read_state(blobs: BlobStore, snapshot_id: str, base: BaseModel, kind: str, *, optimizer: bool) -> RunState:
    """The state of a run whose optimizer is `kind`; without `optimizer` a fresh one of it and no pending gradient.

    Raises BadSnapshot.
    """
    files = read(blobs, snapshot_id)
    adapter = _adapter(files, base)
    if not optimizer:
        return RunState(adapter, fresh_state(kind, adapter))
    if "state.json" not in files:
        raise BadSnapshot("the checkpoint has no optimizer state")
    facts = orjson.loads(files["state.json"])
    if facts["format"] > STATE_FORMAT:
        raise BadSnapshot("the checkpoint was written by a newer release")
    if facts["base_model_hash"] != base.facts.config_hash:
        raise BadSnapshot("the checkpoint belongs to another base model")
    if facts["optimizer"] != kind:
        raise BadSnapshot(f"the checkpoint's optimizer is {facts['optimizer']}, not {kind}")
    tensors = load(files["optimizer.safetensors"])
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
