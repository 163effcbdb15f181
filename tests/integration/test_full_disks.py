"""A disk that is really full: what cannot be written fails by itself, with words that a user understands."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.db import Database
from app.errors import StorageUnavailable
from app.runs.log import ACCEPTED, DONE
from app.storage.blobs import LocalBlobStore
from tests.unit.workers.train.train_lab import Lab, assert_close, random_data, state_of

LARGE = [60] * 4
"""Lengths of data whose body and result are blobs."""
SETTINGS = {"inline_bytes": 256, "snapshot_operations": 2}


class SmallDisk:
    """A file system of two megabytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        with pytest.raises(OSError), self._filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def make_room(self) -> None:
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small disk")
    yield SmallDisk(folder)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)  # the lock of a shared folder is open


@pytest.fixture
def lab(sqlite_url: str, tmp_path: Path, disk: SmallDisk) -> Iterator[Lab]:
    """Its blobs are on the small disk, its database is not."""
    database = Database(sqlite_url)
    made = Lab(database, tmp_path, blobs=LocalBlobStore(disk.folder / "blobs"), **SETTINGS)
    yield made
    made.close()
    database.dispose()


def test_a_request_that_cannot_be_stored_is_not_accepted_and_may_come_again(lab: Lab, disk: SmallDisk) -> None:
    loop, client = lab.worker(), lab.client()
    disk.fill()
    with pytest.raises(StorageUnavailable) as refused:
        client.send(random_data(1, LARGE), seq_id=1)
    assert refused.value.status == 503 and refused.value.headers["Retry-After"]
    assert refused.value.detail == "the blob store cannot be used: its disk is full; try again later"
    disk.make_room()
    client.send(random_data(1, LARGE), seq_id=1)
    lab.work(loop)
    assert client.operation(1).state == DONE


def test_results_saves_and_snapshots_fail_alone_and_the_rest_goes_on(lab: Lab, disk: SmallDisk) -> None:
    loop, client, other = lab.worker(), lab.client(rank=2), lab.client(rank=3)
    lab.work(loop)
    result, saved = client.send(random_data(1, LARGE)), client.save("name")
    sampled = client.save_for_sampler(sampling_session_seq_id=0)
    client.train(1)
    disk.fill()
    lab.work(loop)
    lab.write_snapshots(loop)
    other_step = other.optim_step()
    lab.work(loop)
    for kind, number in (
        ("forward_backward", result),
        ("save_weights", saved),
        ("save_weights_for_sampler", sampled),
    ):
        expected = f"{kind}: the blob store cannot be used: its disk is full; try again later"
        assert client.error(number) == ("server", expected)
    assert other.operation(other_step).state == DONE
    assert client.row.recovery_snapshot_id is None and client.row.applied_seq == client.next_seq - 1
    assert_close(state_of(loop, client), client.alone)
    disk.make_room()
    again = client.save("name")
    client.train(2)
    lab.work(loop)
    lab.write_snapshots(loop)
    assert client.operation(again).state == DONE
    assert client.row.recovery_snapshot_id is not None
    lab.kill(loop)
    second = lab.worker()
    client.train(3)
    lab.work(second)
    assert_close(state_of(second, client), client.alone)


@pytest.mark.parametrize("kind", ["save_weights", "save_weights_for_sampler"])
@pytest.mark.parametrize("shared", [False, True], ids=["spool", "shared folder"])
def test_a_save_says_that_the_workers_own_disk_is_full(
    sqlite_url: str, tmp_path: Path, disk: SmallDisk, kind: str, shared: bool
) -> None:
    database = Database(sqlite_url)
    lab = Lab(database, tmp_path, data_dir=disk.folder, shared_dir=disk.folder / "shared" if shared else None)
    loop, client = lab.worker(), lab.client()
    client.train(1)
    lab.work(loop)
    disk.fill()
    number = client.save("name") if kind == "save_weights" else client.save_for_sampler(path="name")
    step = client.optim_step(note=False)
    lab.work(loop)
    expected = f"{kind}: the blob store cannot be used: the worker's disk is full; try again later"
    assert client.error(number) == ("server", expected)
    assert client.operation(step).state != ACCEPTED
    disk.make_room()
    again = client.save("name") if kind == "save_weights" else client.save_for_sampler(path="name")
    lab.work(loop)
    assert client.operation(again).state == DONE
    lab.close()
    database.dispose()
