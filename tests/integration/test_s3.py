"""What only a bucket does: links of its own, and readers that go on where a connection was cut off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from botocore.exceptions import IncompleteReadError

from app.errors import StorageUnavailable
from app.settings import Settings
from app.storage.blobs import LocalBlobStore, get_blob_store
from app.storage.s3 import S3BlobStore, open_bucket
from tests.s3_server import S3Server

DATA = bytes(range(256)) * 20_000


@pytest.fixture
def bucket(shared_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3BlobStore:
    for name, value in shared_s3.environment(shared_s3.new_bucket()).items():
        monkeypatch.setenv(name, value)
    store = open_bucket(Settings())
    store.put("snapshots/abc/file", DATA)
    return store


def signed(store: S3BlobStore, expires_in_s: int) -> str:
    url = store.signed_url("snapshots/abc/file", filename="a name.bin", expires_in_s=expires_in_s)
    assert url is not None
    return url


def test_a_signed_url_gives_the_blob_under_its_name_without_credentials(bucket: S3BlobStore) -> None:
    answer = httpx.get(signed(bucket, 60))
    assert answer.content == DATA
    assert answer.headers["content-disposition"] == 'attachment; filename="a name.bin"'
    part = httpx.get(signed(bucket, 60), headers={"Range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, DATA[10:20])


def test_a_signed_url_is_for_one_blob_and_some_time_only(bucket: S3BlobStore) -> None:
    assert httpx.get(signed(bucket, 0)).status_code == 403
    assert httpx.get(signed(bucket, 60).replace("abc/file", "abc/other")).status_code == 403


def test_signed_urls_lead_to_the_public_endpoint(bucket: S3BlobStore) -> None:
    store = open_bucket(Settings(s3_public_url="https://blobs.example.org"))
    assert signed(store, 60).startswith("https://blobs.example.org/")


class Cut:
    """A connection that ends early, once."""

    def __init__(self, body: object, after: int) -> None:
        self._body, self._left = body, after

    def iter_chunks(self, size: int) -> Iterator[bytes]:
        for piece in self._body.iter_chunks(1000):  # type: ignore[attr-defined]
            if self._left <= 0:
                raise IncompleteReadError(actual_bytes=1, expected_bytes=2)
            self._left -= len(piece)
            yield piece

    def read(self) -> bytes:
        raise IncompleteReadError(actual_bytes=1, expected_bytes=2)

    def close(self) -> None:
        self._body.close()  # type: ignore[attr-defined]


def cut_once(monkeypatch: pytest.MonkeyPatch, store: S3BlobStore, after: int) -> None:
    real, calls = store._client.get_object, []

    def get_object(**request: object) -> dict[str, object]:
        answer: dict[str, object] = real(**request)
        calls.append(request)
        return answer | {"Body": Cut(answer["Body"], after)} if len(calls) == 1 else answer

    monkeypatch.setattr(store._client, "get_object", get_object)


def test_a_stream_that_is_cut_off_goes_on_where_it_was(bucket: S3BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_once(monkeypatch, bucket, 5000)
    assert b"".join(bucket.stream("snapshots/abc/file", start=7, length=len(DATA))) == DATA[7:]


def test_a_blob_whose_connection_is_cut_off_is_fetched_again(
    bucket: S3BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_once(monkeypatch, bucket, 5000)
    assert bucket.get("snapshots/abc/file") == DATA


def test_reading_with_wrong_credentials_is_an_outage_and_no_missing_blob(
    bucket: S3BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    stranger = open_bucket(Settings())
    for use in (
        lambda: stranger.get("snapshots/abc/file"),
        lambda: stranger.size("snapshots/abc/file"),
        lambda: stranger.list("snapshots"),
        lambda: stranger.delete("snapshots"),
        lambda: next(stranger.stream("snapshots/abc/file", start=0, length=1)),
    ):
        with pytest.raises(StorageUnavailable, match="it denies access"):
            use()
    assert bucket.get("snapshots/abc/file") == DATA


def test_the_process_uses_the_bucket_once_one_is_named(
    configure: Callable[..., None], shared_s3: S3Server, tmp_path: Path
) -> None:
    configure(TINWORKS_DATA_DIR=tmp_path)
    assert isinstance(get_blob_store(), LocalBlobStore)
    configure(**shared_s3.environment(shared_s3.new_bucket()))
    store = get_blob_store()
    store.put("bodies/x", b"x")
    assert isinstance(store, S3BlobStore)
    assert not (tmp_path / "blobs").exists()
