"""What the janitor collects, and what it must not touch."""

from __future__ import annotations

import os
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import orjson
import pytest
from sqlalchemy import delete, select, update

from app.checkpoints import references, uploads
from app.checkpoints.models import Checkpoint, Snapshot, Upload
from app.db import Base, Database, import_models, utc_now
from app.fleet.models import Model
from app.runs import log
from app.runs.log import Finished, Payload
from app.runs.models import Run
from app.sampling.models import SamplingSession
from app.sessions.models import ClientSession
from app.settings import Settings
from app.storage.blobs import BlobStore, LocalBlobStore
from tests.factories import add_checkpoint, add_operation, new_run
from workers import snapshot_files
from workers.collector import Collector

FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}


class World:
    """A database, a store, and a janitor that waits for nothing."""

    def __init__(self, database: Database, blobs: BlobStore, **settings: float) -> None:
        self.database, self.blobs = database, blobs
        self.settings = Settings(**{"orphan_grace_s": 0.0} | settings)  # type: ignore[arg-type]
        self.janitor = Collector(database, blobs, self.settings)
        self.run = new_run(database)

    def snapshot(self, *, row: bool = True, run: Run | None = None) -> str:
        snapshot_id = uuid.uuid4().hex
        snapshot_files.write(self.blobs, snapshot_id, FILES)
        if row:
            of = run or self.run
            with self.database.write() as session:
                session.add(
                    Snapshot(
                        id=snapshot_id, owner_id=of.owner_id, model_id=of.id, seq_id=0, kind="adapter", size_bytes=9
                    )
                )
        return snapshot_id

    def collect(self, rounds: int = 2) -> None:
        """Round by round: the first marks what is unused, the second deletes it."""
        for _ in range(rounds):
            self.janitor.round()

    def is_there(self, snapshot_id: str) -> bool:
        with self.database.read() as session:
            row = session.get(Snapshot, snapshot_id) is not None
        keys = self.blobs.list(f"snapshots/{snapshot_id}")
        assert (len(keys) == 3) == row and len(keys) in (0, 3)
        return row

    def session(self, **values: object) -> None:
        with self.database.write() as session:
            session.execute(update(ClientSession).where(ClientSession.id == self.run.session_id).values(**values))


@pytest.fixture
def world(sqlite_url: str, tmp_path: Path) -> World:
    return World(Database(sqlite_url), LocalBlobStore(tmp_path / "blobs"))


def use(world: World, how: str, snapshot_id: str) -> None:
    """Refer to a snapshot in one of the ways there are."""
    run = world.run
    with world.database.write() as session:
        if how == "checkpoint":
            add_checkpoint(session, run, snapshot_id=snapshot_id)
        elif how == "public copy":
            add_checkpoint(session, session.get_one(Run, run.id), snapshot_id=snapshot_id, public=True)
        elif how == "upload":
            uploads.expect(session, snapshot_id)
        elif how in ("recovery", "sampler"):
            session.execute(update(Run).where(Run.id == run.id).values(**{f"{how}_snapshot_id": snapshot_id}))
        elif how == "sampling session":
            session.add(sampling_session(run, snapshot_id))
        elif how in ("load", "applied load", "load in a blob"):
            body = orjson.dumps({"snapshot_id": snapshot_id, "optimizer": True})
            key = f"bodies/{uuid.uuid4().hex}" if how == "load in a blob" else None
            if key is not None:
                world.blobs.put(key, body)
            add_operation(session, run.id, 1, "load_weights", body=body, body_blob=key)
            if how == "applied load":
                log.finish(session, [Finished(run.id, 1, Payload(b"{}", None, 2), "json")])


def sampling_session(run: Run, snapshot_id: str, *, follows: bool = False) -> SamplingSession:
    return SamplingSession(
        id=f"{run.session_id}:sample:0",
        owner_id=run.owner_id,
        session_id=run.session_id,
        seq_id=0,
        base_model="tiny",
        pool="tiny",
        snapshot_id=snapshot_id,
        follows_model_id=run.id if follows else None,
    )


WAYS = [
    "checkpoint",
    "public copy",
    "upload",
    "recovery",
    "sampler",
    "sampling session",
    "load",
    "applied load",
    "load in a blob",
]


@pytest.mark.parametrize("how", WAYS)
def test_what_is_used_stays_and_what_is_not_goes(world: World, how: str) -> None:
    used, unused = world.snapshot(), world.snapshot()
    use(world, how, used)
    world.collect()
    assert world.is_there(used)
    assert not world.is_there(unused)


def test_the_collector_works_on_both_databases_and_both_stores(database: Database, blob_store: BlobStore) -> None:
    world = World(database, blob_store)
    ways = [how for how in WAYS if how not in ("public copy", "applied load", "load in a blob")]
    used = {how: world.snapshot() for how in ways}
    for how, snapshot_id in used.items():
        use(world, how, snapshot_id)
    unused, orphan = world.snapshot(), world.snapshot(row=False)
    world.collect()
    assert [how for how, snapshot_id in used.items() if world.is_there(snapshot_id)] == ways
    assert not world.is_there(unused)
    assert not world.is_there(orphan)


def test_every_column_that_names_a_blob_or_a_snapshot_is_known_to_the_collector() -> None:
    """A column that is missing here would have its blobs deleted: add it to app.checkpoints.references."""
    import_models()
    known = {f"{column.table.name}.{column.name}" for column in (*references.BLOBS.values(), *references.SNAPSHOTS)}
    named = {
        f"{table.name}.{column.name}"
        for table in Base.metadata.tables.values()
        for column in table.columns
        if "blob" in column.name or "snapshot" in column.name
    }
    by_key = {
        f"{table.name}.{column.name}"
        for table in Base.metadata.tables.values()
        for column in table.columns
        if any(key.column.table.name == "snapshots" for key in column.foreign_keys)
    }
    assert named | by_key == known


@pytest.mark.parametrize("end", ["finished", "silent for long", "silent", None])
def test_ephemeral_snapshots_live_as_long_as_their_session(world: World, end: str | None) -> None:
    sampled, newest = world.snapshot(), world.snapshot()
    use(world, "sampling session", sampled)
    use(world, "sampler", newest)
    now = utc_now()
    ends: dict[str, dict[str, datetime]] = {
        "finished": {"finished_at": now},
        "silent for long": {"silent_since": now - timedelta(days=8)},
        "silent": {"silent_since": now - timedelta(days=6)},
    }
    if end is not None:
        world.session(**ends[end])
    world.collect()
    stays = end in ("silent", None)
    assert [world.is_there(sampled), world.is_there(newest)] == [stays, stays]


@pytest.mark.parametrize(("idle_h", "stays"), [(23, True), (25, False), (None, True)])
def test_ephemeral_snapshots_that_nobody_samples_from_go_but_for_the_newest(
    world: World, idle_h: int | None, stays: bool
) -> None:
    """None: a sampling session of an older release, which did not note it."""
    sampled, newest = world.snapshot(), world.snapshot()
    use(world, "sampling session", sampled)
    use(world, "sampler", newest)
    with world.database.write() as session:
        last = utc_now() - timedelta(hours=idle_h) if idle_h is not None else None
        session.execute(update(SamplingSession).values(last_used_at=last))
    world.collect()
    assert [world.is_there(sampled), world.is_there(newest)] == [stays, True]


def test_the_newest_weights_of_a_finished_session_stay_while_it_has_work(world: World) -> None:
    newest = world.snapshot()
    use(world, "sampler", newest)
    with world.database.write() as session:
        add_operation(session, world.run.id, 1)
    world.session(finished_at=utc_now())
    world.collect()
    assert world.is_there(newest)


def test_weights_that_a_client_has_moved_on_from_go(world: World) -> None:
    old, newest = world.snapshot(), world.snapshot()
    with world.database.write() as session:
        session.add(sampling_session(world.run, old, follows=True))
    use(world, "sampler", newest)
    world.collect()
    assert not world.is_there(old)
    assert world.is_there(newest)


def test_loads_that_failed_or_are_behind_a_recovery_snapshot_pin_nothing(world: World) -> None:
    pruned, failed = world.snapshot(), world.snapshot()
    use(world, "applied load", pruned)
    with world.database.write() as session:
        log.prune_bodies(session, world.run.id, after=-1, upto=1)
        add_operation(session, world.run.id, 2, "load_weights", body=orjson.dumps({"snapshot_id": failed}))
        log.finish(session, [Finished(world.run.id, 2, failure=log.Failure("no", "user"))])
    world.collect()
    assert not world.is_there(pruned)
    assert not world.is_there(failed)


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_a_deleted_checkpoint_and_an_expired_one_give_their_space_back(world: World, kind: str) -> None:
    deleted, kept = world.snapshot(), world.snapshot()
    with world.database.write() as session:
        add_checkpoint(session, world.run, "deleted", kind=kind, snapshot_id=deleted)
        add_checkpoint(session, world.run, "kept", kind=kind, snapshot_id=kept)
    world.collect()
    assert world.is_there(deleted)
    with world.database.write() as session:
        session.execute(delete(Checkpoint).where(Checkpoint.name == "deleted"))
    world.collect()
    assert not world.is_there(deleted)
    assert world.is_there(kept)


def test_a_snapshot_that_is_named_again_within_the_grace_period_stays(sqlite_url: str, tmp_path: Path) -> None:
    """Somebody has found it by a name that is gone now, and is about to refer to it."""
    world = World(Database(sqlite_url), LocalBlobStore(tmp_path / "blobs"), orphan_grace_s=60.0)
    snapshot_id = world.snapshot()
    world.collect(3)
    assert world.is_there(snapshot_id)
    use(world, "checkpoint", snapshot_id)
    world.collect(1)
    with world.database.read() as session:
        assert session.get_one(Snapshot, snapshot_id).unused_since is None


def test_nothing_young_is_touched(sqlite_url: str, tmp_path: Path) -> None:
    world = World(Database(sqlite_url), LocalBlobStore(tmp_path / "blobs"), orphan_grace_s=60.0)
    orphan = world.snapshot(row=False)
    world.blobs.put("bodies/on-its-way", b"x")
    world.blobs.put("results/on-its-way", b"x")
    world.collect(3)
    assert len(world.blobs.list(f"snapshots/{orphan}")) == 3
    assert world.blobs.list("bodies") + world.blobs.list("results") == ["bodies/on-its-way", "results/on-its-way"]


def test_a_snapshot_is_as_old_as_its_youngest_file(sqlite_url: str, tmp_path: Path) -> None:
    """A save that takes longer than the grace period writes file after file."""
    world = World(Database(sqlite_url), LocalBlobStore(tmp_path / "blobs"), orphan_grace_s=60.0)
    saving, left = world.snapshot(row=False), world.snapshot(row=False)
    for snapshot_id, names in ((saving, list(FILES)), (left, [*FILES, "manifest.json"])):
        for name in names:
            os.utime(tmp_path / "blobs" / "snapshots" / snapshot_id / name, (1, 1))
    world.collect()
    assert len(world.blobs.list(f"snapshots/{saving}")) == 3
    assert world.blobs.list(f"snapshots/{left}") == []


def test_bodies_and_results_of_rows_stay_and_others_go(world: World) -> None:
    for folder in ("bodies", "results"):
        for name in ("named", "orphan"):
            world.blobs.put(f"{folder}/{name}", b"x")
    with world.database.write() as session:
        add_operation(session, world.run.id, 1, body_blob="bodies/named")
        log.finish(session, [Finished(world.run.id, 1, Payload(None, "results/named", 1), "proto")])
    world.collect(1)
    assert world.blobs.list("bodies") + world.blobs.list("results") == ["bodies/named", "results/named"]


def test_a_tokenizer_that_no_model_names_stays(world: World) -> None:
    """It is named by its content: a worker that starts may find it there and name it."""
    world.blobs.put("tokenizers/0123.json", b"{}")
    world.collect()
    assert world.blobs.list("tokenizers") == ["tokenizers/0123.json"]
    with world.database.read() as session:
        assert session.scalars(select(Model.tokenizer_blob)).all() == []


def test_rounds_are_bounded_and_reach_everything_in_the_end(world: World) -> None:
    kept = [world.snapshot() for _ in range(5)]
    for number, snapshot_id in enumerate(kept):
        with world.database.write() as session:
            add_checkpoint(session, world.run, f"c{number}", snapshot_id=snapshot_id)
    orphans = [world.snapshot(row=False) for _ in range(9)]
    for number in range(20):
        world.blobs.put(f"bodies/{number:02d}", b"x")
    world.janitor.at_once = 7
    first = world.janitor.round()
    assert 0 < first["bodies"] <= 7 and first["snapshots"] <= 2
    for _ in range(40):
        world.janitor.round()
    assert all(world.is_there(snapshot_id) for snapshot_id in kept)
    assert not any(world.blobs.list(f"snapshots/{snapshot_id}") for snapshot_id in orphans)
    assert world.blobs.list("bodies") == []


def test_two_janitors_at_once_do_what_one_does(database: Database, tmp_path: Path) -> None:
    world = World(database, LocalBlobStore(tmp_path / "blobs"))
    used, unused = world.snapshot(), [world.snapshot() for _ in range(20)]
    use(world, "checkpoint", used)
    orphans = [world.snapshot(row=False) for _ in range(20)]
    janitors = [Collector(database, world.blobs, world.settings) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            list(threads.map(lambda janitor: janitor.round(), janitors))
    assert world.is_there(used)
    assert not any(world.is_there(snapshot_id) for snapshot_id in (*unused, *orphans))


def test_a_janitor_that_dies_between_row_and_files_leaves_them_to_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot_id = world.snapshot()
    world.collect(1)
    with monkeypatch.context() as patch:
        patch.setattr(Collector, "_discard", lambda self, snapshot_id: (_ for _ in ()).throw(OSError("killed")))
        with pytest.raises(OSError, match="killed"):
            world.janitor.round()
    assert len(world.blobs.list(f"snapshots/{snapshot_id}")) == 3
    world.collect(1)
    assert not world.is_there(snapshot_id)


def test_an_upload_that_is_under_way_keeps_its_row(world: World) -> None:
    snapshot_id = world.snapshot()
    use(world, "upload", snapshot_id)
    world.collect()
    with world.database.read() as session:
        assert session.scalars(select(Upload.snapshot_id)).all() == [snapshot_id]
