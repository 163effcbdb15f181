"""A run's state written and read back in the middle of training goes on bit for bit, whatever its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load, save

from app.storage.blobs import LocalBlobStore
from app.wire.types import AdamParams, DimuonParams, LoraConfig
from tests.unit.workers.train.train_lab import random_data, tiny_base
from workers.model.forward import Work, run_pass
from workers.model.optim import OptimizerParams, fresh_state, optimizer_step
from workers.snapshot_files import manifest_of
from workers.train import snapshots
from workers.train.slots import Counters, RunState
from workers.train.snapshots import BadSnapshot, SnapshotFiles

PARAMS: Mapping[str, OptimizerParams] = {
    "adamw": AdamParams(learning_rate=1e-2, eps=1e-6, weight_decay=0.1),
    "dimuon": DimuonParams(learning_rate=1e-2, beta1=0.8),
}


@pytest.fixture
def blobs(tmp_path: Path) -> LocalBlobStore:
    return LocalBlobStore(tmp_path)


def new_state(kind: str) -> RunState:
    adapter = tiny_base().new_adapter(LoraConfig(rank=3, seed=1))
    return RunState(adapter, fresh_state(kind, adapter))


def train(state: RunState, kind: str, first: int, steps: int) -> None:
    for i in range(first, first + steps):
        run_pass(tiny_base(), [Work(state.adapter, random_data(i), "cross_entropy")], micro_batch_tokens=64)
        optimizer_step([(state.adapter, state.optimizer, PARAMS[kind])])


def accumulate(state: RunState) -> None:
    run_pass(tiny_base(), [Work(state.adapter, random_data(99), "cross_entropy")], micro_batch_tokens=64)
    state.counters = Counters(summed=1, failed=[4], tokens=14, version=2)


def written(state: RunState, blobs: LocalBlobStore) -> str:
    files = snapshots.state_files(snapshots.copy_state(state, tiny_base(), seq_id=5), tiny_base())
    snapshots.write(blobs, files)
    return files.id


def changed(state: RunState, blobs: LocalBlobStore, *, without: str | None = None, **facts: object) -> str:
    """A snapshot whose `state.json` says something else, or whose optimizer lacks a tensor."""
    files = snapshots.state_files(snapshots.copy_state(state, tiny_base(), seq_id=5), tiny_base())
    tensors = load(files.files["optimizer.safetensors"])
    if without is not None:
        del tensors[without]
    replaced = {
        "state.json": orjson.dumps(orjson.loads(files.files["state.json"]) | facts),
        "optimizer.safetensors": save(tensors),
    }
    snapshots.write(blobs, SnapshotFiles(files.id, files.kind, {**files.files, **replaced}))
    return files.id


@pytest.mark.parametrize("kind", PARAMS)
def test_training_goes_on_bit_for_bit(kind: str, blobs: LocalBlobStore) -> None:
    state = new_state(kind)
    train(state, kind, 0, 2)
    accumulate(state)
    restored = snapshots.read_state(blobs, written(state, blobs), tiny_base(), kind, optimizer=True)
    assert restored.counters == state.counters and restored.optimizer.step == 2
    assert torch.equal(restored.adapter.grad_flat, state.adapter.grad_flat) and restored.adapter.has_grad
    for each in (state, restored):
        train(each, kind, 2, 3)
    assert torch.equal(restored.adapter.flat, state.adapter.flat)
    for name, tensor in state.optimizer.tensors().items():
        assert torch.equal(restored.optimizer.tensors()[name], tensor)


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("fresh", PARAMS)
def test_weights_alone_begin_with_the_optimizer_that_is_asked_for(kind: str, fresh: str, blobs: LocalBlobStore) -> None:
    state = new_state(kind)
    train(state, kind, 0, 1)
    loaded = snapshots.read_state(blobs, written(state, blobs), tiny_base(), fresh, optimizer=False)
    assert torch.equal(loaded.adapter.flat, state.adapter.flat)
    assert (loaded.optimizer.kind, loaded.optimizer.step) == (fresh, 0)
    assert not any(tensor.any() for tensor in loaded.optimizer.tensors().values())


@pytest.mark.parametrize(("kind", "other"), [("adamw", "dimuon"), ("dimuon", "adamw")])
def test_the_state_of_another_optimizer_is_refused(kind: str, other: str, blobs: LocalBlobStore) -> None:
    with pytest.raises(BadSnapshot, match=f"optimizer is {kind}, not {other}"):
        snapshots.read_state(blobs, written(new_state(kind), blobs), tiny_base(), other, optimizer=True)


@pytest.mark.parametrize(("kind", "tensor"), [("adamw", "v"), ("dimuon", "m")])
def test_a_state_that_is_not_whole_is_refused(kind: str, tensor: str, blobs: LocalBlobStore) -> None:
    snapshot_id = changed(new_state(kind), blobs, without=tensor)
    with pytest.raises(BadSnapshot, match=f"lacks '{tensor}'"):
        snapshots.read_state(blobs, snapshot_id, tiny_base(), kind, optimizer=True)


def test_a_file_says_the_oldest_format_that_holds_it(blobs: LocalBlobStore) -> None:
    """Releases that know only AdamW read its states, and refuse those of other optimizers as newer than they are."""
    for kind, number in (("adamw", 1), ("dimuon", 2)):
        files = snapshots.read(blobs, written(new_state(kind), blobs))
        facts = orjson.loads(files["state.json"])
        assert (facts["format"], facts["optimizer"]) == (number, kind)


def test_a_newer_format_is_refused(blobs: LocalBlobStore) -> None:
    snapshot_id = changed(new_state("adamw"), blobs, format=snapshots.STATE_FORMAT + 1)
    with pytest.raises(BadSnapshot, match="newer release"):
        snapshots.read_state(blobs, snapshot_id, tiny_base(), "adamw", optimizer=True)


@pytest.mark.parametrize("kind", PARAMS)
def test_files_on_the_disk_are_those_in_memory(kind: str, tmp_path: Path) -> None:
    state = new_state(kind)
    train(state, kind, 0, 1)
    accumulate(state)
    copy = snapshots.copy_state(state, tiny_base(), seq_id=5)
    in_memory = snapshots.state_files(copy, tiny_base())
    on_disk = snapshots.state_files(copy, tiny_base(), folder=tmp_path)
    assert manifest_of(on_disk.files) == manifest_of(in_memory.files)
    assert on_disk.size_bytes == in_memory.size_bytes
    for name, data in on_disk.files.items():
        read = data.read_bytes() if isinstance(data, Path) else data
        assert read == in_memory.files[name]
