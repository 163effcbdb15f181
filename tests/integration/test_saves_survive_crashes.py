"""A worker dies between any two steps of a save: what is listed is whole, and what is left over is collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from app.checkpoints import catalogue
from app.checkpoints.files import stored_files
from app.checkpoints.models import Checkpoint, Snapshot
from app.db import Database
from app.paging import Page
from app.runs.models import Operation
from app.storage.blobs import BlobStore, Source
from tests.unit.workers.train.train_lab import Client, Killed, Lab, assert_close, random_data, state_of
from workers import snapshot_files
from workers.collector import Collector
from workers.train import lease
from workers.train.commits import Committer


class Steps:
    """Counts the steps that leave something behind, and kills the process before the `fatal`-th."""

    def __init__(self) -> None:
        self.done, self.fatal = 0, -1

    def next(self) -> None:
        if self.done == self.fatal:
            raise Killed
        self.done += 1


class DeadlyStore:
    """A blob store in which the process may die before and after every change."""

    def __init__(self, store: BlobStore, steps: Steps) -> None:
        self._store, self._steps = store, steps

    def put(self, key: str, data: Source) -> None:
        self._change(self._store.put, key, data)

    def put_new(self, key: str, data: bytes) -> None:
        self._change(self._store.put_new, key, data)

    def delete(self, prefix: str) -> None:
        self._change(self._store.delete, prefix)

    def _change(self, change: Callable[..., None], *args: Any) -> None:
        self._steps.next()
        change(*args)
        self._steps.next()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Steps of blobs, and of commits: before the end of one, and after it."""
    counted = Steps()
    advance, notify = lease.advance, Committer._notify

    def deadly_advance(*args: Any, **options: Any) -> bool:
        moved = advance(*args, **options)
        counted.next()
        return moved

    def deadly_notify(self: Committer, request_ids: Any) -> None:
        counted.next()
        notify(self, request_ids)

    monkeypatch.setattr(lease, "advance", deadly_advance)
    monkeypatch.setattr(Committer, "_notify", deadly_notify)
    return counted


@pytest.fixture
def deadly_lab(sqlite_url: str, tmp_path: Path, blob_store: BlobStore, steps: Steps) -> Iterator[Lab]:
    database = Database(sqlite_url)
    lab = Lab(database, tmp_path, blobs=DeadlyStore(blob_store, steps), inline_bytes=256, orphan_grace_s=0)
    yield lab
    lab.close()
    database.dispose()


SAVES: dict[str, Callable[[Client], int]] = {
    "save_weights": lambda client: client.save("name"),
    "save_weights_for_sampler": lambda client: client.save_for_sampler(path="name"),
    "sampling session": lambda client: client.save_for_sampler(sampling_session_seq_id=0),
    "save_weights_external": lambda client: client._json(client.lab.service.save_weights_external, path="name"),
    "a large result": lambda client: client.send(random_data(5, [60] * 4)),
}


@pytest.mark.parametrize("kind", SAVES)
def test_a_worker_that_dies_in_a_save(deadly_lab: Lab, steps: Steps, kind: str) -> None:
    lab = deadly_lab
    for fatal in range(100):
        loop, client = lab.worker(), lab.client()
        client.train(1)
        lab.work(loop)
        number = SAVES[kind](client)
        steps.done, steps.fatal = 0, fatal
        try:
            lab.work(loop)
            died = False
        except Killed:
            died = True
        steps.fatal = -1
        assert_listing_is_whole(lab)
        lab.kill(loop)
        second = lab.worker()
        lab.work(second)
        assert client.operation(number).state == "done", client.operation(number).error
        assert_listing_is_whole(lab)
        if not died:
            break
    assert fatal >= 4
    lab.restore(second, client)
    if kind != "a large result":
        assert_close(state_of(second, client), client.alone)
    assert_nothing_is_left_over(lab)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_in_a_recovery_snapshot(deadly_lab: Lab, steps: Steps) -> None:
    lab = deadly_lab
    lab.settings.snapshot_operations = 2
    for fatal in range(100):
        loop, client = lab.worker(), lab.client()
        client.train(1)
        lab.work(loop)
        lab.write_snapshots(loop)
        client.train(2)
        steps.done, steps.fatal = 0, fatal
        try:
            lab.work(loop)
            lab.write_snapshots(loop)
            died = steps.done == fatal
        except Killed:
            died = True
        steps.fatal = -1
        lab.kill(loop)
        second = lab.worker()
        client.train(3)
        lab.work(second)
        lab.write_snapshots(second)
        assert_close(state_of(second, client), client.alone)
        if not died:
            break
    assert fatal > 12
    assert_nothing_is_left_over(lab)


def assert_listing_is_whole(lab: Lab) -> None:
    """Every checkpoint that is listed can be read, and is what was written."""
    with lab.database.read() as session:
        rows = session.execute(select(Checkpoint.snapshot_id, Checkpoint.owner_id)).all()
    for snapshot_id, owner_id in rows:
        listed = catalogue.list_of_owner(lab.database, owner_id, Page(limit=100, offset=0))
        assert listed.checkpoints
        files = snapshot_files.read(lab.blobs, snapshot_id)
        assert sum(map(len, files.values())) == listed.checkpoints[0].size_bytes
        assert stored_files(lab.blobs, snapshot_id).keys() == files.keys()


def assert_nothing_is_left_over(lab: Lab) -> None:
    """After the janitor has been there, the store holds what rows name and nothing else."""
    janitor = Collector(lab.database, lab.blobs, lab.settings)
    for _ in range(2):
        janitor.round()
    with lab.database.read() as session:
        snapshots = set(session.scalars(select(Snapshot.id)))
        bodies = set(session.scalars(select(Operation.body_blob).where(Operation.body_blob.is_not(None))))
        results = set(session.scalars(select(Operation.result_blob).where(Operation.result_blob.is_not(None))))
    stored = lab.blobs.list("snapshots")
    assert {key.split("/")[1] for key in stored} == snapshots
    assert {key.split("/")[1] for key in stored if key.endswith("/manifest.json")} == snapshots
    assert set(lab.blobs.list("bodies")) == bodies
    assert set(lab.blobs.list("results")) == results
