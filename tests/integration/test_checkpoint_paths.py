"""What a `tinker://` path points at, and for whom."""

from __future__ import annotations

from datetime import timedelta

import pytest

from app.checkpoints import service as checkpoints
from app.checkpoints.models import Checkpoint, Snapshot
from app.db import Database, utc_now
from app.errors import InvalidRequest, NotFound
from app.runs.models import Run
from tests.factories import add_checkpoint, new_run


@pytest.fixture
def run(database: Database) -> Run:
    return new_run(database)


def resolve(database: Database, run: Run, path: str, owner_id: str | None = None) -> checkpoints.Resolved:
    with database.read() as session:
        return checkpoints.resolve(session, owner_id or run.owner_id, path, field="path")


def add(database: Database, run: Run, name: str = "first", **values: object) -> Checkpoint:
    with database.write() as session:
        return add_checkpoint(session, run, name, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", sorted(checkpoints.KINDS))
def test_a_path_finds_its_checkpoint_snapshot_and_run(database: Database, run: Run, kind: str) -> None:
    row = add(database, run, kind=kind)
    with database.read() as session:
        path = f"tinker://{run.id}/{kind}/first"
        found = checkpoints.resolve(session, run.owner_id, path, field="path", kinds=checkpoints.KINDS)
    assert (found.checkpoint.id, found.snapshot.id, found.run.id) == (row.id, row.snapshot_id, run.id)


def test_exported_weights_are_found_only_by_who_asks_for_them(database: Database, run: Run) -> None:
    add(database, run, kind=checkpoints.EXTERNAL)
    with pytest.raises(InvalidRequest, match=r"path: .* is one of external_weights"):
        resolve(database, run, f"tinker://{run.id}/external_weights/first")


def test_each_kind_is_a_name_space_of_its_own(database: Database, run: Run) -> None:
    add(database, run, kind=checkpoints.TRAINING)
    with pytest.raises(NotFound):
        resolve(database, run, f"tinker://{run.id}/sampler_weights/first")


def test_another_owners_checkpoint_looks_as_if_it_were_not_there(database: Database, run: Run) -> None:
    add(database, run)
    other = new_run(database)
    path = f"tinker://{run.id}/weights/first"
    with pytest.raises(NotFound) as theirs:
        resolve(database, run, path, other.owner_id)
    with pytest.raises(NotFound) as nobodys:
        resolve(database, run, path.replace("first", "never"), run.owner_id)
    assert theirs.value.detail.replace("first", "never") == nobodys.value.detail


def test_an_expired_checkpoint_is_not_there(database: Database, run: Run) -> None:
    add(database, run, "old", expires_at=utc_now() - timedelta(seconds=1))
    add(database, run, "young", expires_at=utc_now() + timedelta(hours=1))
    assert resolve(database, run, f"tinker://{run.id}/weights/young")
    with pytest.raises(NotFound, match="path: there is no checkpoint"):
        resolve(database, run, f"tinker://{run.id}/weights/old")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "weights/first",
        "tinker://",
        "tinker://run/weights",
        "tinker://run/weights/",
        "tinker://run/other/first",
        "tinker://run/weights/a/b",
        "tinker://run/weights/a b",
        "tinker://run/weights/first\n",
        "tinker://ru\0n/weights/first",
        "https://run/weights/first",
    ],
)
def test_what_is_no_path_is_refused_as_invalid(database: Database, run: Run, path: str) -> None:
    with pytest.raises(InvalidRequest, match=r"path: .* is not of the form"):
        resolve(database, run, path)


def name(database: Database, run: Run, snapshot_id: str, **values: object) -> str:
    with database.write() as session:
        checkpoints.add_snapshot(
            session,
            snapshot_id=snapshot_id,
            owner_id=run.owner_id,
            model_id=run.id,
            seq_id=1,
            kind="state",
            size_bytes=1,
        )
        options = {"ttl_seconds": None, "user_metadata": None} | values
        return checkpoints.name_snapshot(
            session,
            owner_id=run.owner_id,
            model_id=run.id,
            kind="weights",
            name="first",
            snapshot_id=snapshot_id,
            **options,  # type: ignore[arg-type]
        )


def test_a_name_that_is_saved_again_points_at_the_new_snapshot_and_the_old_one_stays(
    database: Database, run: Run
) -> None:
    path = name(database, run, "a" * 32, ttl_seconds=3600, user_metadata={"renderer": "old"})
    assert name(database, run, "b" * 32) == path == f"tinker://{run.id}/weights/first"
    found = resolve(database, run, path)
    assert found.snapshot.id == "b" * 32
    assert (found.checkpoint.expires_at, found.checkpoint.user_metadata) == (None, None)
    with database.read() as session:
        assert session.get(Snapshot, "a" * 32) is not None


def test_a_life_is_counted_from_the_save(database: Database, run: Run) -> None:
    path = name(database, run, "a" * 32, ttl_seconds=3600)
    expires_at = resolve(database, run, path).checkpoint.expires_at
    assert expires_at is not None
    assert expires_at - utc_now() == pytest.approx(timedelta(hours=1), abs=timedelta(seconds=5))


def test_two_saves_may_share_a_snapshot(database: Database, run: Run) -> None:
    assert name(database, run, "a" * 32) == name(database, run, "a" * 32)


def test_a_name_is_taken_in_its_own_run_and_kind_only(database: Database, run: Run) -> None:
    add(database, run, kind="weights")
    other = new_run(database)
    with database.read() as session:
        taken = [
            checkpoints.exists(session, owner.id, kind, "first")
            for owner in (run, other)
            for kind in ("weights", "sampler_weights")
        ]
    assert taken == [True, False, False, False]
