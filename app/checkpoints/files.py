"""A snapshot's files as their readers find them, and what is sent of them: one file, or all in a tar."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from app.checkpoints.service import snapshot_folder
from app.errors import NotFound
from app.storage.blobs import BlobMissing, BlobStore

MANIFEST = "manifest.json"
"""Written last: names, sizes and SHA-256 of the other files. Only what it names is part of the snapshot."""
COMPLETE = "checkpoint_complete"
"""An empty file at the end of an archive, by which clients know that it was not cut off (WIRE §11)."""
_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole blob."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes to be sent: pieces in memory and blobs, one after another."""

    parts: Sequence[bytes | Stored]

    @property
    def size(self) -> int:
        """Length in bytes."""
        return sum(_size(part) for part in self.parts)

    def read(self, blobs: BlobStore, start: int, stop: int) -> Iterator[bytes]:
        """The bytes from `start` to before `stop`, in pieces; no part is held in memory whole."""
        place = 0
        for part in self.parts:
            size = _size(part)
            first, last = max(start - place, 0), min(stop - place, size)
            if first < last and isinstance(part, Stored):
                yield from blobs.stream(part.key, start=first, length=last - first)
            elif first < last and isinstance(part, bytes):
                yield part[first:last]
            place += size


def _size(part: bytes | Stored) -> int:
    return part.size if isinstance(part, Stored) else len(part)


def stored_files(blobs: BlobStore, snapshot_id: str) -> dict[str, Stored]:
    """The files of a snapshot by name, as its manifest lists them. Raises NotFound if one is gone, or cut off."""
    folder = snapshot_folder(snapshot_id)
    try:
        manifest = orjson.loads(blobs.get(f"{folder}/{MANIFEST}"))
        files = {name: Stored(f"{folder}/{name}", facts["size"]) for name, facts in manifest.items()}
        whole = all(blobs.size(file.key) == file.size for file in files.values())
    except BlobMissing:
        whole = False
    if not whole:
        raise NotFound("checkpoint_id: the checkpoint's files are not there any more")
    return files


def archive_of(files: dict[str, Stored], *, modified_at: int) -> Content:
    """An uncompressed tar of `files`, never made as a whole. `modified_at`: Unix seconds, of every member."""
    parts: list[bytes | Stored] = []
    for name, file in files.items():
        parts += [_header(name, file.size, modified_at), file, bytes(-file.size % _BLOCK)]
    parts += [_header(COMPLETE, 0, modified_at), bytes(2 * _BLOCK)]
    return Content(parts)


def _header(name: str, size: int, modified_at: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.mtime = size, modified_at
    return member.tobuf(tarfile.GNU_FORMAT)
