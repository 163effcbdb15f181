"""Where a sampler finds an adapter's files, and that only intact ones are used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.checkpoints.files import MANIFEST
from app.checkpoints.service import snapshot_folder
from tests.unit.workers.sample.adapter_lab import CONFIG, PLENTY, WEIGHTS, HeldBlobs
from workers import snapshot_files
from workers.sample.adapter_files import AdapterFiles, NotYetStored
from workers.snapshot_files import BadSnapshot
from workers.snapshot_folders import SnapshotFolders

FILES = {CONFIG: b"{}", WEIGHTS: b"weights", "optimizer.safetensors": b"moments"}


class Disks:
    def __init__(self, folder: Path) -> None:
        self.blobs = HeldBlobs(folder / "blobs")
        self.local = SnapshotFolders(folder / "local", budget_bytes=PLENTY)
        self.shared = SnapshotFolders(folder / "shared", budget_bytes=PLENTY)
        self.files = AdapterFiles(self.local, self.blobs, shared=self.shared)

    def read(self, snapshot_id: str = "s") -> dict[str, bytes]:
        with self.files.hold(snapshot_id) as held:
            return {path.name: path.read_bytes() for path in held.path.iterdir() if path.name != MANIFEST}


@pytest.fixture
def disks(tmp_path: Path) -> Disks:
    return Disks(tmp_path)


ADAPTER = {CONFIG: b"{}", WEIGHTS: b"weights"}


def test_only_the_adapter_is_fetched_and_only_once(disks: Disks) -> None:
    snapshot_files.write(disks.blobs, "s", FILES)
    assert disks.read() == ADAPTER
    disks.blobs.delete(snapshot_folder("s"))
    assert disks.read() == ADAPTER


def test_a_second_sampler_with_the_same_folder_fetches_nothing(disks: Disks, tmp_path: Path) -> None:
    snapshot_files.write(disks.blobs, "s", FILES)
    disks.read()
    other = AdapterFiles(SnapshotFolders(tmp_path / "local", budget_bytes=PLENTY), HeldBlobs(tmp_path / "none"))
    with other.hold("s") as held:
        assert (held.path / WEIGHTS).read_bytes() == b"weights"


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS, MANIFEST])
def test_a_file_that_was_damaged_on_the_disk_is_fetched_again(disks: Disks, name: str) -> None:
    snapshot_files.write(disks.blobs, "s", FILES)
    disks.read()
    (disks.local.root / "s" / name).write_bytes(b"?")
    assert disks.read() == ADAPTER


def test_a_file_that_is_damaged_in_the_blob_store_is_named(disks: Disks) -> None:
    snapshot_files.write(disks.blobs, "s", FILES)
    disks.blobs.put(f"{snapshot_folder('s')}/{WEIGHTS}", b"wei?hts")
    with pytest.raises(BadSnapshot, match=WEIGHTS):
        disks.read()
    assert not (disks.local.root / "s").exists()


def test_a_file_that_is_gone_from_the_blob_store_makes_a_bad_snapshot(disks: Disks) -> None:
    snapshot_files.write(disks.blobs, "s", FILES)
    disks.blobs.delete(f"{snapshot_folder('s')}/{WEIGHTS}")
    with pytest.raises(BadSnapshot, match="not there any more"):
        disks.read()


def test_the_shared_folder_comes_before_the_blob_store(disks: Disks) -> None:
    disks.shared.add("s", FILES)
    assert disks.read() == ADAPTER
    assert not disks.blobs.asked
    assert os.stat(disks.shared.root / "s" / WEIGHTS).st_ino == os.stat(disks.local.root / "s" / WEIGHTS).st_ino
    disks.shared.discard("s")
    assert disks.read() == ADAPTER


def test_files_are_copied_from_another_disk(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    def other_disk(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    disks.shared.add("s", FILES)
    assert disks.read() == ADAPTER


def test_what_is_damaged_in_the_shared_folder_is_fetched_from_the_blob_store(disks: Disks) -> None:
    disks.shared.add("s", FILES)
    (disks.shared.root / "s" / WEIGHTS).write_bytes(b"?")
    snapshot_files.write(disks.blobs, "s", FILES)
    assert disks.read() == ADAPTER


def test_a_snapshot_on_its_way_is_told_from_one_that_is_lost(disks: Disks, tmp_path: Path) -> None:
    files = AdapterFiles(disks.local, disks.blobs, is_coming=lambda snapshot_id: snapshot_id == "s")
    with pytest.raises(NotYetStored):
        files.hold("s")
    with pytest.raises(BadSnapshot):
        files.hold("t")


def test_the_disk_keeps_within_its_budget_but_what_is_held_stays(tmp_path: Path) -> None:
    blobs = HeldBlobs(tmp_path / "blobs")
    for name in "abc":
        snapshot_files.write(blobs, name, {CONFIG: b"{}", WEIGHTS: bytes(1000)})
    files = AdapterFiles(SnapshotFolders(tmp_path / "local", budget_bytes=2600), blobs)
    first = files.hold("a")
    files.hold("b").close()
    files.hold("c").close()
    assert {path.name for path in (tmp_path / "local").iterdir()} == {"a", "c"}
    first.close()
    files.hold("b").close()
    assert {path.name for path in (tmp_path / "local").iterdir()} == {"b", "c"}


def test_the_whole_disk_is_not_looked_through_with_every_adapter(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    trims, trim = [], disks.local.trim
    monkeypatch.setattr(disks.local, "trim", lambda: trims.append(trim()))
    for name in "abcde":
        snapshot_files.write(disks.blobs, name, FILES)
        assert disks.read(name) == ADAPTER
    assert len(trims) == 1
