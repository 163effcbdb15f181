"""Snapshots as folders on a disk that several processes may share: `<root>/<snapshot id>/`, with a manifest.

A folder appears whole, by a rename, and never changes. Who uses one holds it, by a shared lock on its manifest, which a
dead process gives up by itself; folders that nobody holds are removed, least recently used first, when they take more
than their budget.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from app.checkpoints.files import MANIFEST
from app.settings import Settings
from workers.snapshot_files import Content, Manifest, manifest_of, pack_manifest

_NEW, _OLD = ".new-", ".old-"
"""What a folder is called before it is whole, and while it is being removed."""
_LEFTOVER_S = 3600.0
_PORTIONS = 32
"""A folder may grow beyond its budget by one part of so many before it is looked through,"""
_TRIM_EVERY_S = 60.0
"""or for so long: that takes the longer the more there is."""


class HeldFolder:
    """A snapshot's folder that stays while it is held."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    def close(self) -> None:
        """Let go of it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> HeldFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def manifest(self) -> Manifest | None:
        """What the folder should hold; None if that cannot be read."""
        try:
            manifest: Manifest = orjson.loads((self.path / MANIFEST).read_bytes())
        except (OSError, ValueError):
            return None
        return manifest

    def damaged_file(self) -> str | None:
        """The first file that is not what the manifest says, the manifest itself included."""
        manifest = self.manifest()
        return MANIFEST if manifest is None else damaged_file(self.path, manifest)


def damaged_file(folder: Path, manifest: Manifest) -> str | None:
    """The first file in `folder` that is not what `manifest` says."""
    for name, facts in manifest.items():
        try:
            with (folder / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return name
        if digest != facts["sha256"]:
            return name
    return None


def shared_folders(settings: Settings) -> SnapshotFolders | None:
    """Those in the folder that trainers and samplers share, if there is one."""
    if settings.shared_dir is None:
        return None
    return SnapshotFolders(settings.shared_dir / "snapshots", budget_bytes=settings.shared_dir_bytes)


@dataclass(frozen=True, slots=True)
class _Found:
    path: Path
    size: int
    used_at: float


class SnapshotFolders:
    """The snapshots below `root`. Safe to use from any thread of any process."""

    def __init__(self, root: Path, *, budget_bytes: int) -> None:
        self.root = root.resolve()
        self._budget_bytes = budget_bytes
        self._grown = math.inf  # bytes that we have added since it was looked through; nobody has, yet
        self._trimmed_at = 0.0

    def hold(self, snapshot_id: str) -> HeldFolder | None:
        """The folder of a snapshot, kept until it is closed; None if it is not there. Counts as a use."""
        path = self.root / snapshot_id
        manifest = path / MANIFEST
        try:
            lock = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_SH)
            still_there = os.stat(manifest).st_ino == os.fstat(lock).st_ino
        except FileNotFoundError:
            still_there = False
        except BaseException:
            os.close(lock)
            raise
        if not still_there:
            os.close(lock)
            return None
        with suppress(OSError):  # a reader need not be allowed to write
            os.utime(manifest)
        return HeldFolder(path, lock)

    def add(self, snapshot_id: str, files: Mapping[str, Content]) -> None:
        """Write a snapshot."""
        with self.adding(snapshot_id, manifest_of(files)) as folder:
            for name, data in files.items():
                if isinstance(data, Path):
                    shutil.copyfile(data, folder / name)
                else:
                    (folder / name).write_bytes(data)

    @contextmanager
    def adding(self, snapshot_id: str, manifest: Manifest) -> Iterator[Path]:
        """An empty folder to write the files into; at the end of the block it becomes the snapshot's, unless that is
        there by then. If the block raises, nothing is left."""
        folder = self.root / f"{_NEW}{uuid.uuid4().hex}"
        folder.mkdir(parents=True)
        try:
            yield folder
            (folder / MANIFEST).write_bytes(pack_manifest(manifest))
            try:
                folder.rename(self.root / snapshot_id)
                self._grown += sum(facts["size"] for facts in manifest.values())
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def discard(self, snapshot_id: str) -> None:
        """Remove a snapshot, whoever holds it."""
        self._remove(self.root / snapshot_id)

    @property
    def is_trim_due(self) -> bool:
        """Whether it has grown by much, or for long, since this process trimmed it."""
        grown = self._grown * _PORTIONS > self._budget_bytes
        return grown or time.monotonic() - self._trimmed_at > _TRIM_EVERY_S

    def trim(self, *, keep: Iterable[str] = (), idle_s: float = 0.0) -> None:
        """Remove what nobody holds and nobody has used for `idle_s`, least recently used first, until the rest fits the
        budget; `keep` stays anyway."""
        self._grown, self._trimmed_at = 0.0, time.monotonic()
        kept, latest = set(keep), time.time() - idle_s
        found = sorted(self._found(), key=lambda one: one.used_at)
        excess = sum(one.size for one in found) - self._budget_bytes
        for one in found:
            if excess <= 0 or one.used_at > latest:
                return
            if one.path.name not in kept and self._remove_idle(one.path):
                excess -= one.size

    def _found(self) -> list[_Found]:
        found = []
        with suppress(FileNotFoundError), os.scandir(self.root) as entries:
            for entry in entries:
                if entry.name.startswith((_NEW, _OLD)):
                    self._remove_leftover(entry)
                    continue
                with suppress(OSError):  # another process has removed it meanwhile
                    sizes = [file.stat().st_size for file in os.scandir(entry.path)]
                    used_at = os.stat(os.path.join(entry.path, MANIFEST)).st_mtime
                    found.append(_Found(Path(entry.path), sum(sizes), used_at))
        return found

    @staticmethod
    def _remove_leftover(entry: os.DirEntry[str]) -> None:
        """Remove what a process that died has left half-way."""
        with suppress(OSError):
            if entry.stat().st_mtime < time.time() - _LEFTOVER_S:
                shutil.rmtree(entry.path, ignore_errors=True)

    def _remove_idle(self, path: Path) -> bool:
        try:
            lock = os.open(path / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._remove(path)
        except OSError:
            return False
        finally:
            os.close(lock)
        return True

    def _remove(self, path: Path) -> None:
        old = self.root / f"{_OLD}{uuid.uuid4().hex}"
        with suppress(FileNotFoundError):
            path.rename(old)
        shutil.rmtree(old, ignore_errors=True)
