"""The janitor looks after snapshots that nobody uploads: those in its shared folder go to the blob store, those that
are in nobody's are given up after a day."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from app.checkpoints import uploads
from app.checkpoints.models import Snapshot, Upload
from app.db import Database, get_database, utc_now
from app.settings import get_settings
from app.storage.blobs import get_blob_store
from tests.factories import add_checkpoint, new_run
from workers import snapshot_files
from workers.janitor import tidy
from workers.snapshot_folders import shared_folders


@pytest.fixture
def database(configure: Callable[..., None], database_url: str, redis_url: str, tmp_path: Path) -> Database:
    """The database that this process's settings name."""
    configure(
        DATABASE_URL=database_url,
        REDIS_URL=redis_url,
        TINWORKS_DATA_DIR=tmp_path,
        TINWORKS_SHARED_DIR=tmp_path / "shared",
    )
    return get_database()


def saved(database: Database, name: str, age: timedelta) -> str:
    """A snapshot that waits for its upload."""
    run = new_run(database)
    with database.write() as session:
        snapshot_id = add_checkpoint(session, run, name).snapshot_id
        session.add(Upload(snapshot_id=snapshot_id, created_at=utc_now() - age))
    return snapshot_id


def waiting(database: Database) -> list[str]:
    with database.read() as session:
        return uploads.waiting(session)


def test_what_lies_in_the_folder_for_a_minute_is_uploaded(database: Database) -> None:
    old, young = (saved(database, name, timedelta(seconds=s)) for name, s in (("old", 90), ("young", 5)))
    folders = shared_folders(get_settings())
    assert folders is not None
    for snapshot_id in (old, young):
        folders.add(snapshot_id, {"weights": snapshot_id.encode()})
    tidy()
    assert waiting(database) == [young]
    assert snapshot_files.read(get_blob_store(), old) == {"weights": old.encode()}


def test_what_nobody_has_is_given_up_after_a_day(database: Database) -> None:
    lost, late = (saved(database, name, timedelta(hours=h)) for name, h in (("lost", 25), ("late", 23)))
    tidy()
    assert waiting(database) == [late]
    with database.read() as session:
        assert set(session.scalars(select(Snapshot.id))) == {lost, late}
