"""A run that saves again and again, each time for an hour only: what is stored stops growing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select

from app import db
from app.checkpoints.models import Checkpoint, Snapshot
from app.db import Database
from app.runs.log import DONE
from app.storage.blobs import BlobStore
from tests.unit.workers.train.train_lab import Lab
from workers import janitor

SAVES, AT_ONCE = 200, 10
TTL_S = 3600
BETWEEN = timedelta(minutes=30)
"""Between two looks of the janitor, in which so many saves are made."""


class Clock:
    """Time for whoever asks `utc_now`; the stores' own clocks, and the database's, go on as they do."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._ahead, self._real = timedelta(), db.utc_now
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in ("app", "workers") and getattr(module, "utc_now", None) is self._real:
                patch.setattr(module, "utc_now", self)

    def __call__(self) -> datetime:
        return self._real() + self._ahead

    def move(self, by: timedelta) -> None:
        self._ahead += by


@pytest.fixture
def lab(sqlite_url: str, tmp_path: Path, blob_store: BlobStore) -> Iterator[Lab]:
    """Train loops on each of the stores."""
    database = Database(sqlite_url)
    made = Lab(database, tmp_path, blobs=blob_store)
    yield made
    made.close()
    database.dispose()


@pytest.fixture
def tidy(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """One look of the janitor."""
    settings = lab.settings.model_copy(update={"redis_url": "redis://127.0.0.1:1/0"})
    monkeypatch.setattr(janitor, "get_settings", lambda: settings)
    monkeypatch.setattr(janitor, "get_database", lambda: lab.database)
    monkeypatch.setattr(janitor, "get_blob_store", lambda: lab.blobs)
    monkeypatch.setattr(janitor, "_collected_up_to", {})

    def look() -> None:
        janitor.tidy()
        janitor.collect()

    return look


def stored(lab: Lab) -> int:
    """Bytes in the store."""
    return sum(blob.size for folder in ("snapshots", "bodies", "results") for blob in lab.blobs.blobs(folder))


def test_what_is_stored_stops_growing(lab: Lab, tidy: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    loop, client = lab.worker(), lab.client(rank=2)
    sizes, counts = [], []
    for start in range(0, SAVES, AT_ONCE):
        for number in range(start, start + AT_ONCE, 2):
            client.train(number)
            last = [client.save(f"s{number}", ttl_seconds=TTL_S)]
            last.append(client.save_for_sampler(path=f"s{number}", ttl_seconds=TTL_S))
            lab.work(loop)
            assert [client.operation(one).state for one in last] == [DONE, DONE]
        lab.write_snapshots(loop)
        clock.move(BETWEEN)
        tidy()
        sizes.append(stored(lab))
        with lab.database.read() as session:
            counts.append(session.scalar(select(func.count(Snapshot.id))))
    half = len(sizes) // 2
    assert max(sizes[half:]) < 1.001 * max(sizes[:half]), sizes  # numbers grow longer
    assert max(counts[half:]) <= max(counts[:half]) < SAVES / 3, counts

    for _ in range(4):
        clock.move(timedelta(hours=1))
        tidy()
    with lab.database.read() as session:
        assert session.scalars(select(Checkpoint.id)).all() == []
        left = session.scalars(select(Snapshot.id)).all()
    assert set(left) <= {client.row.recovery_snapshot_id, client.row.sampler_snapshot_id}
    assert {key.split("/")[1] for key in lab.blobs.list("snapshots")} == set(left)
