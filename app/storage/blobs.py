"""Immutable blobs by key: the interface, and a local folder that implements it (`s3` has the other one).

Keys are relative paths of safe characters. A blob is written whole or not at all, and never changed.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from app.errors import StorageUnavailable
from app.settings import get_settings

PIECE_BYTES = 2**20
Source = bytes | bytearray | memoryview | Path
"""What a blob is made of: bytes, or a file that nobody changes any more."""
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
_UNFINISHED = ".put-"


class BlobMissing(KeyError):
    """No blob has this key."""


class BlobExists(Exception):
    """A blob has this key already."""


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob as it is listed. `size` in bytes; `modified`: when it was written, by the store's clock."""

    key: str
    size: int
    modified: datetime


class BlobStore(Protocol):
    """Where large, immutable bytes live. Every method raises StorageUnavailable when the store cannot do its part, and
    ValueError for what is no key."""

    def put(self, key: str, data: Source) -> None:
        """Store `data`; complete when it returns."""

    def put_new(self, key: str, data: bytes) -> None:
        """Store `data` unless the key is taken, also by somebody who does the same right now. Raises BlobExists."""

    def get(self, key: str) -> bytes:
        """The bytes of a blob. Raises BlobMissing."""

    def stream(self, key: str, *, start: int, length: int) -> Iterator[bytes]:
        """`length` bytes of a blob from `start`, in pieces of at most `PIECE_BYTES`. Raises BlobMissing at the first;
        a blob that ends before that ends the stream."""

    def signed_url(self, key: str, *, filename: str, expires_in_s: int) -> str | None:
        """An absolute URL by which anybody can fetch a blob for so long, under the name `filename`; None from a store
        that nobody but us can reach."""

    def size(self, key: str) -> int:
        """How many bytes a blob has. Raises BlobMissing."""

    def list(self, prefix: str) -> list[str]:
        """Keys below the folder `prefix`, sorted."""

    def blobs(self, prefix: str, *, after: str = "") -> Iterator[Blob]:
        """The blobs below the folder `prefix`, from the first one behind `after`, the key of an earlier one. They are
        in the order of their keys, as long as no name in a folder is how another one there begins."""

    def delete(self, prefix: str) -> None:
        """Remove the blob `prefix`, or all below the folder of that name. Removing nothing is no error."""

    def remove_unfinished(self, before: datetime) -> int:
        """Remove what puts have left that began before a time and never ended; returns how many."""


class LocalBlobStore:
    """Blobs as files below one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def put(self, key: str, data: Source) -> None:
        with self._written(key, data) as (temporary, path):
            os.replace(temporary, path)

    def put_new(self, key: str, data: bytes) -> None:
        with self._written(key, data) as (temporary, path):
            try:
                os.link(temporary, path)
            except FileExistsError as error:
                raise BlobExists(key) from error

    @contextmanager
    def _written(self, key: str, data: Source) -> Iterator[tuple[Path, Path]]:
        """The data in a file beside the blob's, and the blob's path."""
        path = blob_path(self._root, key)
        temporary = path.parent / f"{_UNFINISHED}{uuid.uuid4().hex}"
        try:
            with _told():
                path.parent.mkdir(parents=True, exist_ok=True)
                _write(temporary, data)
                yield temporary, path
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def get(self, key: str) -> bytes:
        path = blob_path(self._root, key)
        with _told(key):
            return path.read_bytes()

    def stream(self, key: str, *, start: int, length: int) -> Iterator[bytes]:
        path = blob_path(self._root, key)
        with _told(key), path.open("rb") as file:
            file.seek(start)
            while length and (piece := file.read(min(length, PIECE_BYTES))):
                length -= len(piece)
                yield piece

    def signed_url(self, key: str, *, filename: str, expires_in_s: int) -> str | None:
        return None

    def size(self, key: str) -> int:
        path = blob_path(self._root, key)
        with _told(key):
            return path.stat().st_size

    def list(self, prefix: str) -> list[str]:
        return [blob.key for blob in self.blobs(prefix)]

    def blobs(self, prefix: str, *, after: str = "") -> Iterator[Blob]:
        with _told():
            yield from self._below(blob_path(self._root, prefix), prefix, after)

    def _below(self, folder: Path, prefix: str, after: str) -> Iterator[Blob]:
        """In the order of keys, where `a-b` comes before `a/b`."""
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name + ("/" if entry.is_dir() else ""))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            key = f"{prefix}/{entry.name}"
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                if f"{key}/\uffff" > after:
                    yield from self._below(Path(entry.path), key, after)
            elif key > after:
                with suppress(FileNotFoundError):
                    facts = entry.stat()
                    yield Blob(key, facts.st_size, datetime.fromtimestamp(facts.st_mtime, UTC))

    def delete(self, prefix: str) -> None:
        path = blob_path(self._root, prefix)
        with _told(), suppress(FileNotFoundError, NotADirectoryError):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()

    def remove_unfinished(self, before: datetime) -> int:
        count = 0
        for folder, _, names in os.walk(self._root):  # it passes over folders that vanish meanwhile
            for path in (Path(folder, name) for name in names if name.startswith(_UNFINISHED)):
                with suppress(OSError):
                    if path.stat().st_mtime < before.timestamp():
                        path.unlink()
                        count += 1
        return count


def check_key(key: str) -> str:
    """The key. Raises ValueError if it is none."""
    if not _KEY.fullmatch(key):
        raise ValueError(f"not a blob key: {key!r}")
    return key


def blob_path(root: Path, key: str) -> Path:
    """Where a local store has a blob. Raises ValueError."""
    return root / check_key(key)


def _write(path: Path, data: Source) -> None:
    if not isinstance(data, Path):
        path.write_bytes(data)
        return
    try:
        os.link(data, path)
    except OSError:  # another disk, or one without links
        shutil.copyfile(data, path)


@contextmanager
def _told(key: str = "") -> Iterator[None]:
    """Errors of the file system as what a store raises."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        if key:
            raise BlobMissing(key) from error
        raise StorageUnavailable("its folder is not there") from error
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageUnavailable("its disk is full" if full else "its disk has an error") from error


def new_blob_id() -> str:
    """An id that was never used and never will be."""
    return uuid.uuid4().hex


@lru_cache(maxsize=1)
def get_blob_store() -> BlobStore:
    """The blob store of this process: the bucket that the settings name, else a folder in the data directory."""
    settings = get_settings()
    if not settings.s3_bucket:
        return LocalBlobStore(settings.data_dir / "blobs")
    from app.storage.s3 import open_bucket  # boto3, for those who need it

    return open_bucket(settings)
