"""Saves and loads that go through the log."""

from __future__ import annotations

import pytest
import torch
from sqlalchemy import func, select, update

from app.checkpoints.models import Checkpoint, Snapshot
from app.checkpoints.service import snapshot_folder
from app.runs.log import DONE
from app.runs.models import Run
from app.sampling.models import SamplingSession
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, residents, state_of
from workers.train import snapshots


def count(lab: Lab, table: type[Snapshot] | type[Checkpoint]) -> int:
    with lab.database.read() as session:
        return session.scalar(select(func.count()).select_from(table)) or 0


def path_of(client: Client, name: str, kind: str = "weights") -> str:
    return f"tinker://{client.model_id}/{kind}/{name}"


def damage(lab: Lab, snapshot_id: str, file: str) -> None:
    """Flip a bit of a snapshot's file."""
    path = lab.blob_folder / snapshot_folder(snapshot_id) / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_save_holds_the_state_at_its_place_in_the_sequence(each_lab: Lab) -> None:
    lab = each_lab
    loop, client = lab.worker(), lab.client()
    client.train(1)
    client.forward_backward(2)
    save = client.save("here")
    client.train(3)
    lab.work(loop)
    assert client.result(save) == {"path": path_of(client, "here"), "type": "save_weights"}
    snapshot_id = lab.snapshot_of(client, "weights", "here")
    saved = snapshots.read_state(lab.blobs, snapshot_id, lab.base, "adamw", optimizer=True)
    early = lab.client()
    early.train(1)
    early.forward_backward(2)
    lab.work(loop)
    expected = state_of(loop, early)
    assert torch.equal(saved.adapter.flat, expected.flat)
    assert torch.equal(saved.optimizer.m, expected.m) and torch.equal(saved.adapter.grad_flat, expected.grad)
    assert_close(state_of(loop, client), client.alone)


def test_a_taken_name_is_refused_and_keeps_its_checkpoint(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.save("name")
    client.train(1)
    lab.work(loop)
    before = lab.snapshot_of(client, "weights", "name")
    again = client.save("name")
    lab.work(loop)
    category, error = client.error(again)
    assert category == "user" and "overwrite" in error
    assert lab.snapshot_of(client, "weights", "name") == before
    assert count(lab, Snapshot) == 1


def test_overwrite_points_the_name_anew_and_leaves_the_old_files(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.save("name")
    lab.work(loop)
    before = lab.snapshot_of(client, "weights", "name")
    client.train(1)
    again = client.save("name", overwrite=True)
    lab.work(loop)
    assert client.operation(again).state == DONE
    after = lab.snapshot_of(client, "weights", "name")
    assert after != before and count(lab, Checkpoint) == 1
    for snapshot_id in (before, after):
        snapshots.read_state(lab.blobs, snapshot_id, lab.base, "adamw", optimizer=True)


def test_a_name_is_free_in_another_run_and_of_another_kind(lab: Lab) -> None:
    loop, one, other = lab.worker(), lab.client(), lab.client()
    seqs = [(one, one.save("name")), (other, other.save("name")), (one, one.save_for_sampler(path="name"))]
    lab.work(loop)
    assert all(client.operation(seq).state == DONE for client, seq in seqs)
    assert count(lab, Checkpoint) == 3


def test_sampler_saves_without_a_step_between_share_a_snapshot(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    for name in ("a", "b"):
        client.save_for_sampler(path=name)
        lab.work(loop)
    client.send([], forward_only=True)
    client.forward_backward(1)
    client.save_for_sampler(path="c")
    client.optim_step(note=False)
    client.save_for_sampler(path="d")
    lab.work(loop)
    a, b, c, d = (lab.snapshot_of(client, "sampler_weights", name) for name in "abcd")
    assert a == b == c != d
    assert count(lab, Snapshot) == 2


def test_a_load_between_sampler_saves_is_a_change_of_weights(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.save("start")
    client.train(1)
    client.save_for_sampler(path="a")
    lab.work(loop)
    client.load(path_of(client, "start"), optimizer=False)
    client.save_for_sampler(path="b")
    lab.work(loop)
    a, b = (lab.snapshot_of(client, "sampler_weights", name) for name in "ab")
    assert a != b
    loaded = snapshots.read_adapter(lab.blobs, b, lab.base)
    assert torch.equal(loaded.flat, state_of(loop, client).flat)


def sampling_session(lab: Lab, client: Client, seq_id: int) -> SamplingSession:
    with lab.database.read() as session:
        return session.get_one(SamplingSession, str(client.result(seq_id)["sampling_session_id"]))


def test_an_inflight_client_follows_the_run_and_a_snapshot_one_does_not(each_lab: Lab) -> None:
    lab = each_lab
    loop, client = lab.worker(), lab.client()
    fixed = client.save_for_sampler(sampling_session_seq_id=0)
    follows = client.save_for_sampler(sampling_session_seq_id=1, kind="inflight")
    lab.work(loop)
    first = client.row.sampler_snapshot_id
    client.train(1)
    client.save_for_sampler(sampling_session_seq_id=2, kind="inflight")
    lab.work(loop)
    newest = client.row.sampler_snapshot_id
    assert first is not None and newest is not None and newest != first
    frozen, following = sampling_session(lab, client, fixed), sampling_session(lab, client, follows)
    assert (frozen.snapshot_id, frozen.follows_model_id) == (first, None)
    assert following.follows_model_id == client.model_id
    assert torch.equal(snapshots.read_adapter(lab.blobs, newest, lab.base).flat, state_of(loop, client).flat)


def test_a_load_in_place_takes_weights_and_on_demand_the_optimizer(lab: Lab) -> None:
    loop, source = lab.worker(), lab.client(seed=5)
    source.train(1)
    source.save("trained")
    lab.work(loop)
    trained = state_of(loop, source)
    for optimizer in (True, False):
        client = lab.client(seed=6, owner_id=source.owner_id)
        client.forward_backward(8)
        client.load(path_of(source, "trained"), optimizer=optimizer)
        lab.work(loop)
        state = state_of(loop, client)
        assert torch.equal(state.flat, trained.flat)
        assert torch.equal(state.m, trained.m if optimizer else torch.zeros_like(trained.m))
        assert state.step == (1 if optimizer else 0)
        assert not state.grad.any() and state.counters == (0, (), 0)


def test_a_run_made_of_a_checkpoint_goes_on_where_it_was(lab: Lab) -> None:
    loop, source = lab.worker(), lab.client(rank=3)
    source.train(1)
    source.save("here")
    lab.work(loop)
    request = {"session_id": source.row.session_id, "model_seq_id": 1, "path": path_of(source, "here")}
    submitted = lab.service.load_weights(source.owner_id, request | {"optimizer": True, "type": "load_weights"})
    client = Client(lab, source.owner_id, submitted.model_id, 3, 1, script=list(source.script))
    client.train(2)
    lab.work(loop)
    assert client.result(0)["model_id"] == client.model_id
    assert_close(state_of(loop, client), client.alone)
    lab.kill(loop)
    second = lab.worker()
    client.train(3)
    lab.work(second)
    assert_close(state_of(second, client), client.alone)


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors", "state.json"])
def test_a_damaged_checkpoint_is_refused_and_the_run_is_as_it_was(lab: Lab, file: str) -> None:
    loop, client = lab.worker(), lab.client()
    client.save("broken")
    client.train(1)
    client.forward_backward(2)
    lab.work(loop)
    damage(lab, lab.snapshot_of(client, "weights", "broken"), file)
    before = state_of(loop, client)
    load = client.load(path_of(client, "broken"), optimizer=True)
    lab.work(loop)
    category, error = client.error(load)
    assert category == "user" and file in error
    assert state_of(loop, client).same_bits(before)
    lab.kill(loop)
    second = lab.worker()
    client.optim_step()
    lab.work(second)
    assert_close(state_of(second, client), client.alone)


def test_a_checkpoint_whose_files_are_gone_is_refused(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.save("gone")
    lab.work(loop)
    lab.blobs.delete(snapshot_folder(lab.snapshot_of(client, "weights", "gone")))
    load = client.load(path_of(client, "gone"), optimizer=False)
    lab.work(loop)
    assert client.error(load)[0] == "user"
    client.train(1)
    lab.work(loop)
    assert_close(state_of(loop, client), client.alone)


def test_a_checkpoint_of_another_base_model_is_refused(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.save("foreign")
    lab.work(loop)
    before = state_of(loop, client)
    manifest = snapshots.read(lab.blobs, lab.snapshot_of(client, "weights", "foreign"))
    manifest["state.json"] = manifest["state.json"].replace(lab.base.facts.config_hash.encode(), b"0" * 64)
    foreign = snapshots.SnapshotFiles(lab.snapshot_of(client, "weights", "foreign"), "state", manifest)
    lab.blobs.delete(snapshot_folder(foreign.id))
    snapshots.write(lab.blobs, foreign)
    load = client.load(path_of(client, "foreign"), optimizer=True)
    lab.work(loop)
    category, error = client.error(load)
    assert category == "user" and "another base model" in error
    assert state_of(loop, client).same_bits(before)


def test_a_replay_loads_what_was_loaded_though_the_name_moved_on(lab: Lab) -> None:
    first, client = lab.worker(), lab.client()
    client.train(1)
    client.save("moving")
    lab.work(first)
    client.train(2)
    client.load(path_of(client, "moving"), optimizer=True)
    client.train(3)
    client.save("moving", overwrite=True)
    lab.work(first)
    client.script = [("fb", 1), ("step", 0), ("fb", 3), ("step", 0)]
    assert_close(state_of(first, client), client.alone)
    lab.kill(first)
    second = lab.worker()
    client.train(4)
    lab.work(second)
    assert_close(state_of(second, client), client.alone)


def test_a_save_is_not_made_again_by_a_replay(lab: Lab) -> None:
    first, client = lab.worker(), lab.client()
    client.train(1)
    client.save("once")
    client.save_for_sampler(sampling_session_seq_id=0)
    lab.work(first)
    snapshot_id, snapshot_count = lab.snapshot_of(client, "weights", "once"), count(lab, Snapshot)
    lab.kill(first)
    second = lab.worker()
    client.train(2)
    lab.work(second)
    assert residents(second) == {client.model_id}
    assert lab.snapshot_of(client, "weights", "once") == snapshot_id
    assert count(lab, Snapshot) == snapshot_count
    with lab.database.read() as session:
        assert session.scalar(select(func.count()).select_from(SamplingSession)) == 1


def test_a_save_that_cannot_write_fails_and_names_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, client = lab.worker(), lab.client()
    client.train(1)
    lab.work(loop)

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(snapshots, "write", full)
        saves = [client.save("a"), client.save_for_sampler(path="b"), client.save_for_sampler(path="c")]
        lab.work(loop)
    assert [client.error(seq)[0] for seq in saves] == ["server"] * 3
    assert count(lab, Checkpoint) == count(lab, Snapshot) == 0
    assert client.row.sampler_snapshot_id is None
    again = client.save_for_sampler(path="b")
    lab.work(loop)
    assert client.operation(again).state == DONE
    assert_close(state_of(loop, client), client.alone)


def test_a_load_that_the_worker_finds_of_another_rank_is_refused(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client(rank=4)
    client.save("four")
    lab.work(loop)
    other = lab.client(rank=4, owner_id=client.owner_id)
    with lab.database.write() as session:
        session.execute(update(Run).where(Run.id == other.model_id).values(lora_rank=2))
        session.execute(update(Run).where(Run.id == client.model_id).values(lora_rank=2))
    load = other.load(path_of(client, "four"), optimizer=False)
    lab.work(loop)
    category, error = other.error(load)
    assert category == "user" and "rank" in error
