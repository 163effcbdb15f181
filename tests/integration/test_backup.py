"""A backup holds everything: restored into another database, training goes on as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import delete, func, select
from typer.testing import CliRunner

from app.accounts.models import ApiKey, Owner
from app.backup import service
from app.backup.service import BackupFailed, backup, restore
from app.checkpoints.models import Checkpoint, Snapshot
from app.cli import app
from app.db import Base, Database
from app.runs.models import Operation, Run
from app.storage.blobs import BlobMissing, LocalBlobStore
from app.storage.s3 import S3BlobStore
from tests.s3_server import S3Server
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, state_of


def silent(line: str) -> None:
    """Nobody listens."""


def trained(lab: Lab) -> tuple[Client, str]:
    """A run with a checkpoint, a snapshot for recovery, and operations after it, one of them with a large body."""
    lab.settings.inline_bytes = 10
    loop, client = lab.worker(), lab.client(seed=5)
    client.train(1)
    client.save("kept")
    lab.work(loop)
    loop.hand_over()
    client.train(2)
    lab.work(lab.worker())
    client.train(3)  # accepted, and not done yet
    assert lab.blobs.list("bodies") and lab.blobs.list("results")
    return client, f"tinker://{client.model_id}/weights/kept"


@pytest.fixture
def other(request: pytest.FixtureRequest, database: Database) -> Iterator[Database]:
    """An empty database of the other kind."""
    target = Database(request.getfixturevalue("postgres_url" if database.is_sqlite else "sqlite_url"))
    yield target
    target.dispose()


def counts(database: Database) -> dict[str, int]:
    with database.read() as session:
        tables = Base.metadata.sorted_tables
        return {t.name: session.scalar(select(func.count()).select_from(t)) or 0 for t in tables if t.name != "workers"}


def test_a_restored_run_trains_on_in_another_database(
    each_lab: Lab, other: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, path = trained(each_lab)
    backup(each_lab.database, each_lab.blobs, tmp_path / "backup", say=silent)

    lab = Lab(other, tmp_path / "restored")
    with other.write() as session:  # the lab has registered a model
        for table in reversed(Base.metadata.sorted_tables):
            session.execute(delete(table))
    try:
        restore(other, lab.blobs, tmp_path / "backup", say=silent)
        assert counts(other) == counts(each_lab.database)
        client.lab = lab
        loop = lab.worker()
        lab.work(loop)
        assert_close(state_of(loop, client), client.alone)
        copy = lab.client_from(path, owner_id=client.owner_id, optimizer=True)
        lab.work(loop)
        assert copy.operation(0).state == "done"
    finally:
        lab.close()


def test_numbers_go_on_where_they_were(each_lab: Lab, other: Database, tmp_path: Path) -> None:
    with each_lab.database.write() as session:
        session.add(Owner(id="o", name="o"))
        session.flush()
        session.add_all(ApiKey(owner_id="o", prefix=str(n), key_hash=str(n)) for n in range(3))
    backup(each_lab.database, each_lab.blobs, tmp_path / "backup", say=silent)
    restore(other, LocalBlobStore(tmp_path / "blobs"), tmp_path / "backup", say=silent)
    with other.write() as session:
        session.add(new := ApiKey(owner_id="o", prefix="new", key_hash="new"))
        session.flush()
        assert new.id == 4


def test_a_second_backup_copies_only_what_is_new(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(lab)
    backup(lab.database, lab.blobs, tmp_path / "backup", say=silent)
    read: list[str] = []
    real = lab.blobs.stream

    def stream(key: str, **where: Any) -> Iterator[bytes]:
        read.append(key)
        return real(key, **where)

    monkeypatch.setattr(lab.blobs, "stream", stream)
    lab.blobs.put("results/new", b"x")
    backup(lab.database, lab.blobs, tmp_path / "backup", say=silent)
    assert read == ["results/new"]


def test_a_snapshot_that_is_replaced_meanwhile_does_not_spoil_it(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables name a snapshot that came after the blobs were copied and is gone before it can be."""
    trained(lab)
    real, looked = service._dump, []

    def dump(database: Database, folder: Path) -> Any:
        found = real(database, folder)
        looked.append(1)
        if len(looked) == 1:
            found[0].snapshots.add("replaced-meanwhile")
        return found

    monkeypatch.setattr(service, "_dump", dump)
    backup(lab.database, lab.blobs, tmp_path / "backup", say=silent)
    assert len(looked) == 2


def test_a_row_whose_blob_is_lost_is_no_good_backup(lab: Lab, tmp_path: Path) -> None:
    trained(lab)
    with lab.database.read() as session:
        lost = session.scalars(select(Snapshot.id)).first()
    lab.blobs.delete(f"snapshots/{lost}")
    with pytest.raises(BackupFailed, match="not in the blob store"):
        backup(lab.database, lab.blobs, tmp_path / "backup", say=silent)
    assert not (tmp_path / "backup" / "backup.json").exists()


def test_nothing_is_restored_over_what_is_there(lab: Lab, tmp_path: Path) -> None:
    trained(lab)
    backup(lab.database, lab.blobs, tmp_path / "backup", say=silent)
    before = counts(lab.database)
    with pytest.raises(BackupFailed, match="not empty"):
        restore(lab.database, lab.blobs, tmp_path / "backup", say=silent)
    assert counts(lab.database) == before


def test_another_revision_is_refused(lab: Lab, tmp_path: Path) -> None:
    backup(lab.database, lab.blobs, tmp_path / "backup", say=silent)
    path = tmp_path / "backup" / "backup.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"revision": "0001"}))
    with pytest.raises(BackupFailed, match="restore with the version"):
        restore(lab.database, lab.blobs, tmp_path / "backup", say=silent)


def test_a_folder_that_is_no_backup(lab: Lab, tmp_path: Path) -> None:
    with pytest.raises(BackupFailed, match="no backup"):
        restore(lab.database, lab.blobs, tmp_path, say=silent)


def test_no_worker_holds_a_restored_run(lab: Lab, postgres_url: str, tmp_path: Path) -> None:
    client, _ = trained(lab)
    assert client.row.worker_id is not None
    backup(lab.database, lab.blobs, tmp_path / "backup", say=silent)
    target = Database(postgres_url)
    restore(target, LocalBlobStore(tmp_path / "blobs"), tmp_path / "backup", say=silent)
    with target.read() as session:
        assert session.get_one(Run, client.model_id).worker_id is None
        assert session.scalar(select(func.count()).select_from(Checkpoint)) == 1
        assert session.scalar(select(func.count()).select_from(Operation)) == client.next_seq
    target.dispose()


def test_from_a_folder_into_a_bucket(lab: Lab, postgres_url: str, shared_s3: S3Server, tmp_path: Path) -> None:
    trained(lab)
    backup(lab.database, lab.blobs, tmp_path / "backup", say=silent)
    bucket = S3BlobStore(shared_s3.client(), shared_s3.new_bucket())
    target = Database(postgres_url)
    restore(target, bucket, tmp_path / "backup", say=silent)
    kept = [key for folder in service.FOLDERS for key in lab.blobs.list(folder)]
    assert kept and [bucket.get(key) for key in kept] == [lab.blobs.get(key) for key in kept]
    backup(target, bucket, tmp_path / "again", say=silent)
    assert (tmp_path / "again" / "blobs" / kept[0]).exists()
    target.dispose()


def test_the_commands(configure: Callable[..., None], sqlite_url: str, postgres_url: str, tmp_path: Path) -> None:
    configure(DATABASE_URL=sqlite_url, TINWORKS_DATA_DIR=tmp_path / "here")
    assert CliRunner().invoke(app, ["keys", "create", "ada"]).exit_code == 0
    taken = CliRunner().invoke(app, ["backup", str(tmp_path / "backup")])
    assert taken.exit_code == 0 and "rows of" in taken.stdout
    configure(DATABASE_URL=postgres_url, TINWORKS_DATA_DIR=tmp_path / "there")
    restored = CliRunner().invoke(app, ["restore", str(tmp_path / "backup")])
    assert restored.exit_code == 0, restored.output
    assert "ada" in CliRunner().invoke(app, ["keys", "list"]).stdout
    again = CliRunner().invoke(app, ["restore", str(tmp_path / "backup")])
    assert again.exit_code == 1 and "not empty" in again.stderr


def test_blobs_that_go_while_they_are_copied_are_left_out(lab: Lab, tmp_path: Path) -> None:
    class Fleeting(LocalBlobStore):
        def stream(self, key: str, *, start: int, length: int) -> Iterator[bytes]:
            raise BlobMissing(key)

    store = Fleeting(lab.blob_folder)
    store.put("bodies/old", b"x")
    backup(lab.database, store, tmp_path / "backup", say=silent)
    assert not (tmp_path / "backup" / "blobs" / "bodies" / "old").exists()
