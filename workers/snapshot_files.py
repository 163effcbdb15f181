"""A snapshot's files, whatever they hold: written whole, and read back checked against their manifest.

snapshots/<id>/adapter_config.json, adapter_model.safetensors    PEFT's own layout
snapshots/<id>/optimizer.safetensors, state.json                 only of kind "state"
snapshots/<id>/manifest.json                                     sizes and SHA-256 of the others, written last
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from app.checkpoints.files import MANIFEST
from app.checkpoints.service import snapshot_folder
from app.runs.log import NewerRelease
from app.storage.blobs import BlobExists, BlobMissing, BlobStore

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What a sampler needs."""
GONE = "the checkpoint's files are not there any more"
Content = bytes | Path
"""A file of a snapshot: its bytes, or where it lies on the disk."""
Manifest = dict[str, dict[str, Any]]
"""Size and SHA-256 by file name."""


class BadSnapshot(ValueError):
    """A snapshot's files are missing, damaged, of another model or of a newer release."""


class NewerSnapshot(BadSnapshot, NewerRelease):
    """A newer release has written it, in a form that this one cannot read."""


def size_of(data: Content) -> int:
    """Bytes of a file."""
    return data.stat().st_size if isinstance(data, Path) else len(data)


def manifest_of(files: Mapping[str, Content]) -> Manifest:
    """The manifest of these files."""
    return {name: {"size": size_of(data), "sha256": _sha256(data)} for name, data in files.items()}


def _sha256(data: Content) -> str:
    if isinstance(data, bytes):
        return hashlib.sha256(data).hexdigest()
    with data.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pack_manifest(manifest: Manifest) -> bytes:
    """As it is stored."""
    return orjson.dumps(manifest, option=orjson.OPT_SORT_KEYS)


def write(blobs: BlobStore, snapshot_id: str, files: Mapping[str, Content]) -> None:
    """Write the files, then the manifest: a snapshot without one is none. Raises BlobExists if there is one that says
    otherwise: a snapshot never changes."""
    folder = snapshot_folder(snapshot_id)
    for name, data in files.items():
        blobs.put(f"{folder}/{name}", data)
    manifest, key = pack_manifest(manifest_of(files)), f"{folder}/{MANIFEST}"
    try:
        blobs.put_new(key, manifest)
    except BlobExists:  # of the same upload by another worker, or by us when the answer was lost
        if blobs.get(key) != manifest:
            raise


def read_manifest(blobs: BlobStore, snapshot_id: str) -> Manifest | None:
    """The manifest of a snapshot; None if it is not in the store."""
    try:
        manifest: Manifest = orjson.loads(blobs.get(f"{snapshot_folder(snapshot_id)}/{MANIFEST}"))
    except BlobMissing:
        return None
    return manifest


def read(blobs: BlobStore, snapshot_id: str) -> dict[str, bytes]:
    """All files of a snapshot, checked against its manifest. Raises BadSnapshot."""
    folder = snapshot_folder(snapshot_id)
    manifest = read_manifest(blobs, snapshot_id)
    if manifest is None:
        raise BadSnapshot(GONE)
    try:
        files = {name: blobs.get(f"{folder}/{name}") for name in manifest}
    except BlobMissing as error:
        raise BadSnapshot(GONE) from error
    for name, facts in manifest_of(files).items():
        if facts != manifest[name]:
            raise BadSnapshot(damaged(name))
    return files


def damaged(name: str) -> str:
    """What a client is told of a file that is not what was written."""
    return f"the checkpoint's {name} is damaged"
