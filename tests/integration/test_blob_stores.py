"""What every blob store does, on a local folder and on S3 (SeaweedFS)."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from app.errors import StorageUnavailable
from app.settings import Settings
from app.storage.blobs import PIECE_BYTES, BlobExists, BlobMissing, BlobStore, Source

SMALL = b"some bytes"
LARGE = os.urandom(1 << 20) * 20 + b"and seven"


def key_of(store: BlobStore, data: Source, key: str = "snapshots/abc/file.bin") -> str:
    store.put(key, data)
    return key


@pytest.mark.parametrize("data", [b"", SMALL, LARGE], ids=["empty", "small", "20 MB"])
@pytest.mark.parametrize("form", ["bytes", "bytearray", "memoryview", "file"])
def test_what_is_put_is_what_is_got(blob_store: BlobStore, tmp_path: Path, data: bytes, form: str) -> None:
    path = tmp_path / "source"
    path.write_bytes(data)
    sources: dict[str, Source] = {
        "bytes": data,
        "bytearray": bytearray(data),
        "memoryview": memoryview(b"??" + data)[2:],
        "file": path,
    }
    key = key_of(blob_store, sources[form])
    path.unlink()
    assert blob_store.size(key) == len(data)
    assert blob_store.get(key) == data


def test_a_second_put_replaces_the_first(blob_store: BlobStore) -> None:
    key = key_of(blob_store, b"first, and longer")
    assert blob_store.get(key_of(blob_store, SMALL)) == SMALL == blob_store.get(key)


@pytest.mark.parametrize("use", ["get", "size", "stream", "stream of nothing"])
def test_what_is_not_there_is_missing(blob_store: BlobStore, use: str) -> None:
    key_of(blob_store, SMALL, "snapshots/abc/file.bin")
    uses: dict[str, Callable[[str], object]] = {
        "get": blob_store.get,
        "size": blob_store.size,
        "stream": lambda key: next(blob_store.stream(key, start=0, length=1)),
        "stream of nothing": lambda key: list(blob_store.stream(key, start=0, length=0)),
    }
    with pytest.raises(BlobMissing):
        uses[use]("snapshots/abc/other.bin")


@pytest.mark.parametrize("key", ["", "/a", "a/", "../a", "a/../b", "a//b", "a/.b", "a b", "a\0", "a\n", "ä", "a/b\\c"])
def test_unsafe_keys_are_refused_by_every_method(blob_store: BlobStore, key: str) -> None:
    for use in (
        lambda: blob_store.put(key, SMALL),
        lambda: blob_store.put_new(key, SMALL),
        lambda: blob_store.get(key),
        lambda: blob_store.size(key),
        lambda: list(blob_store.stream(key, start=0, length=1)),
        lambda: blob_store.list(key),
        lambda: blob_store.delete(key),
    ):
        with pytest.raises(ValueError, match="not a blob key"):
            use()


@pytest.mark.parametrize(
    ("start", "length", "expected"),
    [
        (0, len(LARGE), LARGE),
        (PIECE_BYTES - 3, 7, LARGE[PIECE_BYTES - 3 : PIECE_BYTES + 4]),
        (len(LARGE) - 5, 1000, LARGE[-5:]),
        (len(LARGE), 10, b""),
        (len(LARGE) + 10, 10, b""),
        (100, 0, b""),
    ],
)
def test_any_range_is_streamed_in_small_pieces(blob_store: BlobStore, start: int, length: int, expected: bytes) -> None:
    key = key_of(blob_store, LARGE)
    pieces = list(blob_store.stream(key, start=start, length=length))
    assert b"".join(pieces) == expected
    assert all(0 < len(piece) <= PIECE_BYTES for piece in pieces)


def test_only_the_first_of_those_who_put_something_new_succeeds(blob_store: BlobStore) -> None:
    together = threading.Barrier(8)

    def put(i: int) -> bool:
        together.wait()
        try:
            blob_store.put_new("snapshots/abc/manifest.json", f"{i}".encode())
        except BlobExists:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        outcomes = list(threads.map(put, range(8)))
    assert sum(outcomes) == 1
    assert blob_store.get("snapshots/abc/manifest.json") == f"{outcomes.index(True)}".encode()
    assert blob_store.list("snapshots") == ["snapshots/abc/manifest.json"]


def test_a_folder_of_thousands_is_listed_whole_in_order_and_deleted_whole(blob_store: BlobStore) -> None:
    keys = [f"results/{i % 7}/{i:04d}" for i in range(1205)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda key: blob_store.put(key, b"x"), [*keys, "results-too", "results2/x"]))
    assert blob_store.list("results") == sorted(keys)
    assert [blob.key for blob in blob_store.blobs("results", after=sorted(keys)[1003])] == sorted(keys)[1004:]
    blob_store.delete("results")
    assert blob_store.list("results") == []
    assert blob_store.get("results-too") == blob_store.get("results2/x") == b"x"


def test_a_list_goes_on_behind_any_key(blob_store: BlobStore) -> None:
    ids = sorted(uuid.uuid4().hex for _ in range(4))
    keys = [f"snapshots/{id}/{name}" for id in ids for name in ("adapter_config.json", "manifest.json")]
    for key in reversed(keys):
        blob_store.put(key, b"x")
    for i, key in enumerate(keys):
        assert [blob.key for blob in blob_store.blobs("snapshots", after=key)] == keys[i + 1 :]


def test_deleting_takes_a_blob_or_a_folder_and_nothing_beside_it(blob_store: BlobStore) -> None:
    for key in ("a/one", "a/one-more", "b/c/d", "b/c2"):
        blob_store.put(key, SMALL)
    for prefix in ("a/one", "b/c", "a/one", "never/was"):
        blob_store.delete(prefix)
    assert blob_store.list("a") + blob_store.list("b") == ["a/one-more", "b/c2"]


def test_listed_blobs_say_their_size_and_when_they_were_written(blob_store: BlobStore) -> None:
    key_of(blob_store, SMALL)
    (blob,) = blob_store.blobs("snapshots")
    assert blob.size == len(SMALL)
    assert abs(blob.modified - datetime.now(UTC)) < timedelta(seconds=30)


def test_a_put_that_breaks_off_leaves_nothing_that_is_seen_or_stays(blob_store: BlobStore, tmp_path: Path) -> None:
    interrupted(blob_store, tmp_path)
    assert blob_store.list("snapshots") == []
    now = datetime.now(UTC)
    assert blob_store.remove_unfinished(now - timedelta(minutes=5)) == 0
    assert blob_store.remove_unfinished(now + timedelta(minutes=5)) == 1
    assert blob_store.remove_unfinished(now + timedelta(minutes=5)) == 0


def interrupted(store: BlobStore, tmp_path: Path) -> None:
    """What a process that dies in the middle of a put has left."""
    if hasattr(store, "_client"):
        store._client.create_multipart_upload(Bucket=store._bucket, Key=store._name("snapshots/abc/file.bin"))  # type: ignore[attr-defined]
    else:
        folder = tmp_path / "blobs" / "snapshots" / "abc"
        folder.mkdir(parents=True)
        (folder / ".put-0123").write_bytes(b"half")


def test_a_store_that_cannot_be_used_says_so_and_no_more(broken_store: BlobStore, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(LARGE)
    uses: list[Callable[[], object]] = [
        lambda: broken_store.put("bodies/secret-name", SMALL),
        lambda: broken_store.put("bodies/secret-name", LARGE),
        lambda: broken_store.put("bodies/secret-name", large),
        lambda: broken_store.put_new("bodies/secret-name", SMALL),
    ]
    for use in uses:
        with pytest.raises(StorageUnavailable) as caught:
            use()
        for secret in ("secret-name", "bodies", str(tmp_path), "hidden-bucket", "hidden-key"):
            assert secret not in caught.value.detail
        assert caught.value.status == 503


@pytest.fixture(params=["local", "unreachable", "wrong secret"])
def broken_store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BlobStore:
    """A store that nothing can be written to."""
    if request.param == "local":
        from app.storage.blobs import LocalBlobStore

        (tmp_path / "blobs").write_text("a file where the folder should be")
        return LocalBlobStore(tmp_path / "blobs")
    from app.storage import s3

    monkeypatch.setattr(s3, "_TRIES", 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hidden-key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-key")
    url = "http://127.0.0.1:9" if request.param == "unreachable" else request.getfixturevalue("shared_s3").url
    return s3.open_bucket(Settings(s3_bucket="hidden-bucket", s3_endpoint_url=url))
