"""Uploads of snapshots from the folder that trainers and samplers share to the blob store."""

from __future__ import annotations

from datetime import timedelta

import structlog

from app.checkpoints import uploads
from app.db import Database, utc_now
from app.storage.blobs import BlobStore
from workers import snapshot_files
from workers.snapshot_folders import HeldFolder, SnapshotFolders

logger = structlog.get_logger(__name__)


def upload_waiting(folders: SnapshotFolders, database: Database, blobs: BlobStore, *, older_than_s: float) -> int:
    """Upload what has waited for so long and is in this folder; returns how many. Two that do it at once write the
    same files."""
    with database.read() as session:
        waiting = uploads.waiting(session, before=utc_now() - timedelta(seconds=older_than_s))
    count = 0
    for snapshot_id in waiting:
        if (held := folders.hold(snapshot_id)) is not None:
            with held:
                upload(snapshot_id, held, database, blobs)
            count += 1
    return count


def upload(snapshot_id: str, held: HeldFolder, database: Database, blobs: BlobStore) -> None:
    """Upload one snapshot and note that."""
    name = held.damaged_file()
    if name is None:
        names = held.manifest() or {}
        snapshot_files.write(blobs, snapshot_id, {name: held.path / name for name in names})
    else:  # readers will be told that it is gone
        logger.error("shared_file_damaged", snapshot_id=snapshot_id, file=name)
    with database.write() as session:
        uploads.uploaded(session, snapshot_id)
