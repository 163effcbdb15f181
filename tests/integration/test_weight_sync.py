"""Saves for samplers through a shared folder: readable at once, in the blob store a moment later, lost by no death."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from sqlalchemy import update

from app.checkpoints import uploads
from app.checkpoints.models import Upload
from app.db import Database, utc_now
from app.runs.log import ACCEPTED, DONE
from tests.integration.test_saves_hold_up_nobody import SlowBlobs, turn
from tests.integration.test_train_loop_saves import path_of, sampling_session
from tests.services import wait_for
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, state_of
from workers import snapshot_files
from workers.model.lora import Adapter
from workers.sample.adapter_files import AdapterFiles, NotYetStored, adapter_files
from workers.snapshot_folders import shared_folders
from workers.train import shared, snapshots
from workers.train.loop import TrainLoop
from workers.uploading import upload_waiting


class SharingLab(Lab):
    """Train workers that share a folder with samplers, before a blob store that writes no snapshot until it may."""

    def __init__(self, database: Database, folder: Path, **settings: Any) -> None:
        super().__init__(database, folder, shared_dir=folder / "shared", **settings)
        self.slow = SlowBlobs(self.blob_folder)
        self.blobs = self.slow
        self._sharing: list[TrainLoop] = []

    def sharing_worker(self) -> TrainLoop:
        """A worker that uploads."""
        loop = self.worker()
        assert loop._shared is not None
        loop._shared.start()
        self._sharing.append(loop)
        return loop

    def sampler(self, **changed: Any) -> AdapterFiles:
        """Where a sampler of these settings, with an empty disk, finds adapters."""
        number = len(list(self.settings.data_dir.glob("sampler-*")))
        local = self.settings.data_dir / f"sampler-{number}"
        local.mkdir()
        settings = self.settings.model_copy(update={"adapter_dir": local, **changed})
        return adapter_files(settings, self.blobs, self.database)

    def adapter(self, files: AdapterFiles, snapshot_id: str) -> Adapter:
        """What a sampler loads."""
        with files.hold(snapshot_id) as held:
            return snapshots.read_adapter_folder(held.path, self.base)

    def waiting(self) -> list[str]:
        """What is still to be uploaded."""
        with self.database.read() as session:
            return uploads.waiting(session)

    def age(self, seconds: float) -> None:
        """Let time pass since the saves."""
        with self.database.write() as session:
            session.execute(update(Upload).values(created_at=utc_now() - timedelta(seconds=seconds)))

    def close(self) -> None:
        self.slow.go.set()
        for loop in self._sharing:
            assert loop._shared is not None
            loop._shared.stop(10)
        super().close()


@pytest.fixture
def lab(sqlite_url: str, tmp_path: Path) -> Iterator[SharingLab]:
    database = Database(sqlite_url)
    made = SharingLab(database, tmp_path)
    yield made
    made.close()
    database.dispose()


@pytest.fixture
def each_lab(database: Database, tmp_path: Path) -> Iterator[SharingLab]:
    made = SharingLab(database, tmp_path)
    yield made
    made.close()


def saved(lab: SharingLab, loop: TrainLoop, client: Client, **fields: Any) -> str:
    """The snapshot of a save for samplers that must be done now."""
    save = client.save_for_sampler(**fields)
    lab.work(loop)
    assert client.operation(save).state == DONE
    snapshot_id = client.row.sampler_snapshot_id
    assert snapshot_id is not None
    return snapshot_id


@pytest.mark.parametrize(
    "fields",
    [{"path": "named"}, {"sampling_session_seq_id": 0}, {"sampling_session_seq_id": 0, "kind": "inflight"}],
    ids=["named", "ephemeral", "inflight"],
)
def test_a_sampler_has_the_weights_before_the_blob_store_has(each_lab: SharingLab, fields: dict[str, Any]) -> None:
    lab = each_lab
    loop, client = lab.sharing_worker(), lab.client()
    client.train(1)
    snapshot_id = saved(lab, loop, client, **fields)
    assert torch.equal(lab.adapter(lab.sampler(), snapshot_id).flat, state_of(loop, client).flat)
    assert lab.waiting() == [snapshot_id]
    lab.slow.go.set()
    wait_for(lambda: not lab.waiting())
    stored = lab.adapter(lab.sampler(shared_dir=None), snapshot_id)
    assert torch.equal(stored.flat, state_of(loop, client).flat)


def test_a_sampler_without_the_folder_waits_for_the_blob_store(lab: SharingLab) -> None:
    loop, client = lab.sharing_worker(), lab.client()
    snapshot_id = saved(lab, loop, client, path="named")
    elsewhere = lab.sampler(shared_dir=None)
    with pytest.raises(NotYetStored):
        elsewhere.hold(snapshot_id)
    lab.slow.go.set()
    wait_for(lambda: not lab.waiting())
    elsewhere.hold(snapshot_id).close()


def test_nobody_sees_weights_older_than_its_own_save(lab: SharingLab) -> None:
    loop, client, sampler = lab.sharing_worker(), lab.client(), lab.sampler()
    seen = []
    for number in range(4):
        client.train(number)
        save = client.save_for_sampler(sampling_session_seq_id=number, kind="inflight")
        lab.work(loop)
        follows = sampling_session(lab, client, save).follows_model_id
        assert follows == client.model_id
        newest = client.row.sampler_snapshot_id
        assert newest is not None
        assert torch.equal(lab.adapter(sampler, newest).flat, state_of(loop, client).flat)
        seen.append((newest, state_of(loop, client).flat))
    for snapshot_id, flat in seen:
        assert torch.equal(lab.adapter(lab.sampler(), snapshot_id).flat, flat), "a snapshot never changes"


def test_without_the_folder_a_save_is_in_the_blob_store_when_it_is_done(lab: SharingLab) -> None:
    lab.settings = lab.settings.model_copy(update={"shared_dir": None})
    loop, client = lab.worker(), lab.client()
    save = client.save_for_sampler(path="named")
    turn(loop)
    assert client.operation(save).state == ACCEPTED
    lab.slow.go.set()
    lab.work(loop)
    assert client.operation(save).state == DONE and not lab.waiting()
    snapshot_files.read(lab.blobs, lab.snapshot_of(client, "sampler_weights", "named"))


def test_an_upload_that_failed_is_tried_again(lab: SharingLab) -> None:
    lab.slow.broken = True
    lab.slow.go.set()
    loop, client = lab.sharing_worker(), lab.client()
    snapshot_id = saved(lab, loop, client, path="named")
    wait_for(lambda: lab.slow.failures)
    assert lab.waiting() == [snapshot_id]
    lab.slow.broken = False
    wait_for(lambda: not lab.waiting())
    snapshot_files.read(lab.blobs, snapshot_id)


def test_what_a_dead_worker_had_to_upload_another_does(lab: SharingLab, monkeypatch: pytest.MonkeyPatch) -> None:
    first, client = lab.worker(), lab.client()
    snapshot_id = saved(lab, first, client, path="named")
    lab.kill(first)
    lab.slow.go.set()
    monkeypatch.setattr(shared, "_LOOK_EVERY_S", 0.01)
    lab.sharing_worker()
    assert lab.waiting() == [snapshot_id], "it is given time to do it itself"
    lab.age(shared.ORPHANED_S + 1)
    wait_for(lambda: not lab.waiting())
    snapshot_files.read(lab.blobs, snapshot_id)


def test_a_worker_that_stops_uploads_what_it_has(lab: SharingLab) -> None:
    loop, client = lab.sharing_worker(), lab.client()
    snapshot_id = saved(lab, loop, client, path="named")
    assert loop._shared is not None
    stopping = threading.Thread(target=loop._shared.stop, args=(30,))
    stopping.start()
    lab.slow.go.set()
    stopping.join()
    assert not lab.waiting()
    snapshot_files.read(lab.blobs, snapshot_id)


def test_what_waits_stays_in_the_folder_whatever_its_budget(lab: SharingLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "_IDLE_S", 0.0)
    lab.settings = lab.settings.model_copy(update={"shared_dir_bytes": 0})
    loop, client = lab.sharing_worker(), lab.client()
    snapshot_id = saved(lab, loop, client, path="named")
    folders = shared_folders(lab.settings)
    assert folders is not None
    folders.trim(keep=lab.waiting())
    assert (folders.root / snapshot_id).exists()
    lab.slow.go.set()
    wait_for(lambda: not (folders.root / snapshot_id).exists())
    assert not lab.waiting()


def test_a_load_reads_from_the_folder_what_is_not_in_the_blob_store(lab: SharingLab) -> None:
    loop, source = lab.worker(), lab.client()
    source.train(1)
    saved(lab, loop, source, path="named")
    client = lab.client(owner_id=source.owner_id)
    client.load(path_of(source, "named", "sampler_weights"), optimizer=False)
    lab.work(loop)
    assert torch.equal(state_of(loop, client).flat, state_of(loop, source).flat)


def test_a_load_by_a_worker_without_the_folder_waits_for_the_blob_store(
    lab: SharingLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "_LOOK_AGAIN_S", 0.01)
    loop, source = lab.sharing_worker(), lab.client()
    source.train(1)
    saved(lab, loop, source, path="named")
    elsewhere, client = lab.worker(shared_dir=None), lab.client(owner_id=source.owner_id)
    lab.work(elsewhere)
    load = client.load(path_of(source, "named", "sampler_weights"), optimizer=False)
    looks = []
    looking = uploads.is_waiting

    def counted(*args: Any) -> bool:
        looks.append(args)
        if len(looks) == 3:
            lab.slow.go.set()
        return looking(*args)

    monkeypatch.setattr(uploads, "is_waiting", counted)
    lab.work(elsewhere)
    assert client.operation(load).state == DONE
    assert torch.equal(state_of(elsewhere, client).flat, state_of(loop, source).flat)


def test_a_file_that_was_damaged_in_the_folder_is_not_uploaded(lab: SharingLab) -> None:
    loop, client = lab.worker(), lab.client()
    snapshot_id = saved(lab, loop, client, path="named")
    folders = shared_folders(lab.settings)
    assert folders is not None
    (folders.root / snapshot_id / "adapter_model.safetensors").write_bytes(b"?")
    lab.slow.go.set()
    assert upload_waiting(folders, lab.database, lab.blobs, older_than_s=-1) == 1
    assert not lab.waiting()
    with pytest.raises(snapshot_files.BadSnapshot):
        snapshot_files.read(lab.blobs, snapshot_id)


def test_a_save_that_does_not_fit_the_folder_fails(lab: SharingLab) -> None:
    (lab.settings.data_dir / "shared").write_text("not a folder")
    loop, client = lab.worker(), lab.client()
    save = client.save_for_sampler(path="named")
    client.train(1)
    lab.work(loop)
    assert client.error(save)[0] == "server"
    assert client.row.sampler_snapshot_id is None and not lab.waiting()
    assert_close(state_of(loop, client), client.alone)
