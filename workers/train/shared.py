"""Sampler snapshots in the folder that trainers and samplers share, and their way from there to the blob store.

A save puts its files there and is committed then, together with a row that says that they are still to be uploaded.
Uploading happens behind, by the worker that has saved; if that is gone, by any worker that has the folder. Readers who
do not have it wait while the row is there.
"""

from __future__ import annotations

import threading
import time
from collections import deque

import structlog

from app.checkpoints import uploads
from app.db import Database
from app.storage.blobs import BlobStore
from workers import snapshot_files
from workers.snapshot_files import BadSnapshot, damaged
from workers.snapshot_folders import HeldFolder, SnapshotFolders
from workers.spool import told_when_full
from workers.train.snapshots import SnapshotFiles
from workers.uploading import upload, upload_waiting

logger = structlog.get_logger(__name__)

ORPHANED_S = 30.0
"""A snapshot that its own worker has not uploaded by then is taken over by others."""
_LOOK_EVERY_S = 10.0
_LONGEST_PAUSE_S = 30.0
_STORED_WITHIN_S = 60.0
_LOOK_AGAIN_S = 0.2
_IDLE_S = 60.0


class SharedSnapshots:
    """A train worker's side of the shared folder."""

    def __init__(self, folders: SnapshotFolders, database: Database, blobs: BlobStore) -> None:
        self._folders = folders
        self._database = database
        self._blobs = blobs
        self._mine: deque[tuple[str, HeldFolder]] = deque()
        self._bell = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploads", daemon=True)

    def start(self) -> None:
        """Start the thread that uploads."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Upload what waits, if that can be done in time; others do the rest."""
        self._stopping.set()
        self._bell.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def add(self, files: SnapshotFiles) -> HeldFolder:
        """Write a snapshot. Its folder stays while it is held, also when nothing else says that it is needed. Raises
        StorageUnavailable if the disk is full."""
        while True:
            with told_when_full():
                self._folders.add(files.id, files.files)
            if (held := self._folders.hold(files.id)) is not None:
                return held

    def upload(self, snapshot_id: str, held: HeldFolder) -> None:
        """Upload a snapshot soon, whose row is committed, and let go of it then."""
        self._mine.append((snapshot_id, held))
        self._bell.set()

    def _run(self) -> None:
        pause_s = 0.0
        while not (self._stopping.is_set() and not self._mine):
            self._bell.wait(pause_s or _LOOK_EVERY_S)
            self._bell.clear()
            try:
                self._upload_mine()
                upload_waiting(self._folders, self._database, self._blobs, older_than_s=ORPHANED_S)
                self._trim()
                pause_s = 0.0
            except Exception as error:  # the files and the row are still there; later, or others, will do
                logger.warning("upload_failed", waiting=len(self._mine), error=type(error).__name__)
                if self._stopping.is_set():
                    return
                pause_s = min(max(2 * pause_s, 0.5), _LONGEST_PAUSE_S)
                self._stopping.wait(pause_s)

    def _upload_mine(self) -> None:
        while self._mine:
            snapshot_id, held = self._mine[0]
            upload(snapshot_id, held, self._database, self._blobs)
            self._mine.popleft()
            held.close()

    def _trim(self) -> None:
        if not self._folders.is_trim_due:
            return
        with self._database.read() as session:
            waiting = uploads.waiting(session)
        self._folders.trim(keep=waiting, idle_s=_IDLE_S)


class NotStoredYet(BadSnapshot):
    """A snapshot is on its way to the blob store, and has been for long."""


class SnapshotReader:
    """Reads any snapshot for a train worker, with the shared folder or without."""

    def __init__(self, database: Database, blobs: BlobStore, folders: SnapshotFolders | None) -> None:
        self._database = database
        self._blobs = blobs
        self._folders = folders

    def read(self, snapshot_id: str) -> dict[str, bytes]:
        """All files of a snapshot, checked. Waits for one that is on its way to the blob store, for a minute at most.
        Raises BadSnapshot, which may be NotStoredYet."""
        deadline = time.monotonic() + _STORED_WITHIN_S
        while True:
            held = self._folders.hold(snapshot_id) if self._folders is not None else None
            if held is not None:
                with held:
                    return self._read_folder(held)
            with self._database.read() as session:
                is_coming = uploads.is_waiting(session, snapshot_id)
            if not is_coming:
                return snapshot_files.read(self._blobs, snapshot_id)
            if time.monotonic() >= deadline:
                raise NotStoredYet("the checkpoint's files are not stored yet; try again later")
            time.sleep(_LOOK_AGAIN_S)

    @staticmethod
    def _read_folder(held: HeldFolder) -> dict[str, bytes]:
        if (name := held.damaged_file()) is not None:
            raise BadSnapshot(damaged(name))
        return {name: (held.path / name).read_bytes() for name in held.manifest() or {}}
