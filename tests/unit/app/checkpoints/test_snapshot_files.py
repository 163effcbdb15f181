"""What is sent of a snapshot: any part of one file, or of a tar that is never made as a whole."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.checkpoints.files import COMPLETE, MANIFEST, Content, Stored, archive_of, stored_files
from app.errors import NotFound
from app.storage import blobs as storage
from app.storage.blobs import BlobMissing, LocalBlobStore

FILES = {"adapter_config.json": b"{}\n", "adapter_model.safetensors": bytes(range(256)) * 21, "empty": b""}


def write(blobs: LocalBlobStore, files: dict[str, bytes] = FILES) -> str:
    for name, data in files.items():
        blobs.put(f"snapshots/abc/{name}", data)
    manifest = {name: {"size": len(data), "sha256": ""} for name, data in files.items()}
    blobs.put(f"snapshots/abc/{MANIFEST}", orjson.dumps(manifest))
    return "abc"


def whole(content: Content, blobs: LocalBlobStore) -> bytes:
    return b"".join(content.read(blobs, 0, content.size))


def test_an_archive_holds_every_file_and_says_that_it_is_complete(tmp_path: Path) -> None:
    blobs = LocalBlobStore(tmp_path)
    content = archive_of(stored_files(blobs, write(blobs)), modified_at=1_700_000_000)
    data = whole(content, blobs)
    assert len(data) == content.size
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == [*FILES, COMPLETE]
        assert all(member.isreg() and member.mode == 0o644 for member in members)
        assert {member.mtime for member in members} == {1_700_000_000}
        read = {member.name: tar.extractfile(member).read() for member in members}  # type: ignore[union-attr]
    assert read == {**FILES, COMPLETE: b""}


def test_a_file_larger_than_eight_gigabytes_has_a_header() -> None:
    size = 9 * 2**30
    content = archive_of({"big": Stored("snapshots/abc/big", size)}, modified_at=0)
    header = content.parts[0]
    assert isinstance(header, bytes)
    assert tarfile.TarInfo.frombuf(header, "utf-8", "strict").size == size
    assert content.size == 512 + size + 512 + 1024


def test_what_the_manifest_does_not_name_is_not_part_of_it(tmp_path: Path) -> None:
    blobs = LocalBlobStore(tmp_path)
    write(blobs)
    blobs.put("snapshots/abc/left-over", b"x")
    assert stored_files(blobs, "abc").keys() == FILES.keys()


@pytest.mark.parametrize("name", [MANIFEST, "adapter_config.json"])
def test_a_snapshot_that_lacks_a_file_is_not_there(tmp_path: Path, name: str) -> None:
    blobs = LocalBlobStore(tmp_path)
    write(blobs)
    blobs.delete(f"snapshots/abc/{name}")
    with pytest.raises(NotFound, match="files are not there"):
        stored_files(blobs, "abc")


def test_a_snapshot_with_a_file_that_was_cut_off_is_not_there(tmp_path: Path) -> None:
    blobs = LocalBlobStore(tmp_path)
    write(blobs)
    blobs.put("snapshots/abc/adapter_config.json", b"{")
    with pytest.raises(NotFound, match="files are not there"):
        stored_files(blobs, "abc")


@given(ends=st.tuples(st.integers(0, 9000), st.integers(0, 9000)).map(sorted))
def test_any_part_of_an_archive_is_that_part(tmp_path_factory: pytest.TempPathFactory, ends: list[int]) -> None:
    blobs = LocalBlobStore(tmp_path_factory.getbasetemp() / "parts")
    content = archive_of(stored_files(blobs, write(blobs)), modified_at=7)
    start, stop = (min(end, content.size) for end in ends)
    assert b"".join(content.read(blobs, start, stop)) == whole(content, blobs)[start:stop]


def test_a_large_blob_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PIECE_BYTES", 1000)
    blobs = LocalBlobStore(tmp_path)
    data = bytes(range(250)) * 10
    blobs.put("a/b", data)
    pieces = list(blobs.stream("a/b", start=100, length=2300))
    assert [len(piece) for piece in pieces] == [1000, 1000, 300]
    assert b"".join(pieces) == data[100:2400]
    assert b"".join(blobs.stream("a/b", start=2400, length=999)) == data[2400:]


def test_a_blob_that_is_not_there_cannot_be_streamed(tmp_path: Path) -> None:
    with pytest.raises(BlobMissing):
        next(LocalBlobStore(tmp_path).stream("a/b", start=0, length=1))
