"""Where a sampler finds the files of an adapter: on its own disk, in the folder that trainers write to, in the blob
store. What is used lies in a folder of its own on the sampler's disk, checked against the manifest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import structlog

from app.checkpoints import uploads
from app.checkpoints.service import snapshot_folder
from app.db import Database
from app.settings import Settings
from app.storage.blobs import BlobMissing, BlobStore
from workers.snapshot_files import ADAPTER_FILES, GONE, BadSnapshot, Manifest, damaged, read_manifest
from workers.snapshot_folders import HeldFolder, SnapshotFolders, damaged_file, shared_folders

logger = structlog.get_logger(__name__)

_TRIES = 3


class NotYetStored(Exception):
    """The snapshot is only where this sampler cannot see it, and on its way to the blob store."""


class AdapterFiles:
    """The files of adapters. Used by any number of threads, and beside other samplers with the same folders.

    `local`: this sampler's disk. `shared`: where trainers leave snapshots before they upload them. `is_coming`: whether
    a snapshot that is not in the blob store is on its way there.
    """

    def __init__(
        self,
        local: SnapshotFolders,
        blobs: BlobStore,
        *,
        shared: SnapshotFolders | None = None,
        is_coming: Callable[[str], bool] = lambda snapshot_id: False,
    ) -> None:
        self._local = local
        self._shared = shared
        self._blobs = blobs
        self._is_coming = is_coming

    def hold(self, snapshot_id: str) -> HeldFolder:
        """The folder of an adapter's files, all intact, which stays until it is closed. Raises BadSnapshot or
        NotYetStored."""
        for _ in range(_TRIES):
            if (held := self._intact(snapshot_id)) is not None:
                return held
            if self._link(snapshot_id) and (held := self._intact(snapshot_id)) is not None:
                break
            self._download(snapshot_id)
            if (held := self._intact(snapshot_id)) is not None:
                break
        else:
            raise OSError(f"the adapter {snapshot_id} does not stay on the disk")
        if self._local.is_trim_due:
            self._local.trim()
        return held

    def _intact(self, snapshot_id: str) -> HeldFolder | None:
        held = self._local.hold(snapshot_id)
        if held is None:
            return None
        name = held.damaged_file()
        if name is None:
            return held
        held.close()
        logger.warning("adapter_file_damaged", snapshot_id=snapshot_id, file=name)
        self._local.discard(snapshot_id)
        return None

    def _link(self, snapshot_id: str) -> bool:
        """Take the files from the shared folder, as links to them where the disk is the same. False if they are not
        there."""
        if self._shared is None:
            return False
        source = self._shared.hold(snapshot_id)
        if source is None:
            return False
        with source:
            manifest = source.manifest()
            if manifest is None or not all(name in manifest for name in ADAPTER_FILES):
                return False
            with self._local.adding(snapshot_id, _of_adapter(manifest)) as folder:
                for name in ADAPTER_FILES:
                    _link_or_copy(source.path / name, folder / name)
        return True

    def _download(self, snapshot_id: str) -> None:
        manifest = read_manifest(self._blobs, snapshot_id)
        if manifest is None:
            if self._is_coming(snapshot_id):
                raise NotYetStored
            # it may have arrived between the two questions
            manifest = read_manifest(self._blobs, snapshot_id)
        if manifest is None:
            raise BadSnapshot(GONE)
        wanted = _of_adapter(manifest)
        with self._local.adding(snapshot_id, wanted) as folder:
            for name, facts in wanted.items():
                self._download_file(f"{snapshot_folder(snapshot_id)}/{name}", folder / name, facts["size"])
            if (bad := damaged_file(folder, wanted)) is not None:
                raise BadSnapshot(damaged(bad))

    def _download_file(self, key: str, path: Path, size: int) -> None:
        try:
            with path.open("wb") as file:
                for piece in self._blobs.stream(key, start=0, length=size):
                    file.write(piece)
        except BlobMissing as error:
            raise BadSnapshot(GONE) from error


def adapter_files(settings: Settings, blobs: BlobStore, database: Database) -> AdapterFiles:
    """The files as this worker's settings have them."""
    local = SnapshotFolders(
        settings.adapter_dir or settings.data_dir / "adapters", budget_bytes=settings.adapter_disk_bytes
    )

    def is_coming(snapshot_id: str) -> bool:
        with database.read() as session:
            return uploads.is_waiting(session, snapshot_id)

    return AdapterFiles(local, blobs, shared=shared_folders(settings), is_coming=is_coming)


def _of_adapter(manifest: Manifest) -> Manifest:
    missing = [name for name in ADAPTER_FILES if name not in manifest]
    if missing:
        raise BadSnapshot(f"the checkpoint has no {missing[0]}")
    return {name: manifest[name] for name in ADAPTER_FILES}


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
