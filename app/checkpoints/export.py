"""Checkpoints as folders in PEFT's layout, for who operates the service; clients have `downloads`."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import orjson

from app.checkpoints import uploads
from app.checkpoints.files import MANIFEST
from app.checkpoints.service import resolve_for_operator, snapshot_folder
from app.db import Database
from app.errors import InvalidRequest, NotFound, Unavailable
from app.fleet.models import Model
from app.storage.blobs import BlobMissing, BlobStore

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


@dataclass(frozen=True, slots=True)
class Exportable:
    """A checkpoint whose files are in the blob store. `source`: where the workers of its base model found that, if one
    has registered it."""

    snapshot_id: str
    base_model: str
    source: str | None


def find(database: Database, path: str) -> Exportable:
    """The checkpoint at `path`, of any owner. Raises InvalidRequest, NotFound, or Unavailable while its files are on
    their way to the blob store."""
    with database.read() as session:
        found = resolve_for_operator(session, path, field="PATH")
        if uploads.is_waiting(session, found.snapshot.id):
            raise Unavailable("PATH: the checkpoint's files are not stored yet; try again in a moment")
        model = session.get(Model, found.run.pool) if found.run.pool is not None else None
        return Exportable(found.snapshot.id, found.run.base_model, model.source if model else None)


def write_adapter(blobs: BlobStore, snapshot_id: str, folder: Path) -> None:
    """The adapter's files, checked against their manifest, in `folder`. Raises NotFound if they are gone or damaged,
    InvalidRequest if they are encrypted."""
    where = snapshot_folder(snapshot_id)
    try:
        manifest = orjson.loads(blobs.get(f"{where}/{MANIFEST}"))
        for name in ADAPTER_FILES:
            if f"{name}.age" in manifest:
                raise InvalidRequest("PATH: the export is encrypted; who has the key can download and decrypt it")
            digest = hashlib.sha256()
            with (folder / name).open("wb") as file:
                for piece in blobs.stream(f"{where}/{name}", start=0, length=manifest[name]["size"]):
                    digest.update(piece)
                    file.write(piece)
            if digest.hexdigest() != manifest[name]["sha256"]:
                raise NotFound(f"PATH: the checkpoint's {name} is damaged")
    except BlobMissing as error:
        raise NotFound("PATH: the checkpoint's files are not there any more") from error
