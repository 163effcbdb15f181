"""Immutable blobs by key: the interface, and a local folder that implements it.

Keys are relative paths of safe characters. A blob is written whole or not at all, and never changed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from app.settings import get_settings

PIECE_BYTES = 2**20
_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


class BlobMissing(KeyError):
    """No blob has this key."""


class BlobStore(Protocol):
    """Where large, immutable bytes live."""

    def put(self, key: str, data: bytes) -> None:
        """Store `data`; durable and complete when it returns."""

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

    def delete(self, prefix: str) -> None:
        """Remove the blob `prefix`, or all below the folder of that name. Removing nothing is no error."""


class LocalBlobStore:
    """Blobs as files below one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=".put-")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError as error:
            raise BlobMissing(key) from error

    def stream(self, key: str, *, start: int, length: int) -> Iterator[bytes]:
        try:
            file = self._path(key).open("rb")
        except FileNotFoundError as error:
            raise BlobMissing(key) from error
        with file:
            file.seek(start)
            while length and (piece := file.read(min(length, PIECE_BYTES))):
                length -= len(piece)
                yield piece

    def signed_url(self, key: str, *, filename: str, expires_in_s: int) -> str | None:
        return None

    def size(self, key: str) -> int:
        try:
            return self._path(key).stat().st_size
        except FileNotFoundError as error:
            raise BlobMissing(key) from error

    def list(self, prefix: str) -> list[str]:
        folder = self._path(prefix)
        files = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
        return sorted(str(p.relative_to(self._root)) for p in files)

    def delete(self, prefix: str) -> None:
        path = self._path(prefix)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key):
            raise ValueError(f"not a blob key: {key!r}")
        return self._root / key


def new_blob_id() -> str:
    """An id that was never used and never will be."""
    return uuid.uuid4().hex


@lru_cache(maxsize=1)
def get_blob_store() -> BlobStore:
    """The blob store of this process."""
    return LocalBlobStore(get_settings().data_dir / "blobs")
