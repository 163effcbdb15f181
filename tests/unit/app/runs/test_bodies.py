"""Bodies that are stored while they are checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.runs.bodies import FOLDER, BodyStore
from app.settings import Settings
from app.storage.blobs import LocalBlobStore


@pytest.fixture
def store(tmp_path: Path) -> BodyStore:
    return BodyStore(LocalBlobStore(tmp_path), Settings(inline_bytes=10))


def test_a_small_body_stays_in_the_row(store: BodyStore) -> None:
    with store.begin(b"small") as body:
        assert body.payload().inline == b"small"
    assert store.blobs.list(FOLDER) == []


def test_a_large_body_that_is_taken_stays(store: BodyStore) -> None:
    with store.begin(b"x" * 100) as body:
        payload = body.payload()
    assert payload.blob is not None
    assert store.blobs.list(FOLDER) == [payload.blob]
    assert store.blobs.get(payload.blob) == b"x" * 100


class FullStore(LocalBlobStore):
    """It takes nothing."""

    def put(self, key: str, data: bytes) -> None:
        raise OSError("no space left")


def test_a_store_that_fails_hides_no_other_error(tmp_path: Path) -> None:
    store = BodyStore(FullStore(tmp_path), Settings(inline_bytes=10))
    with pytest.raises(ZeroDivisionError), store.begin(b"x" * 100):
        raise ZeroDivisionError
    with pytest.raises(OSError, match="no space"), store.begin(b"x" * 100) as body:
        body.payload()


def test_a_large_body_that_is_not_taken_goes(store: BodyStore) -> None:
    with pytest.raises(ZeroDivisionError), store.begin(b"x" * 100):
        raise ZeroDivisionError
    assert store.blobs.list(FOLDER) == []
