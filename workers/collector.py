"""Collects what nothing refers to: snapshots that are not used any more, and blobs of rows that never came or are gone.

A save writes its blobs, then the row that names them, so a blob without a row is young and on its way, or was left by a
process that died between the two, by a commit that failed, or by a deletion that was cut off. Age tells them apart:
nothing that was written within the grace period is touched, and a snapshot is as old as its youngest file. Rows are
deleted before their blobs. So any step may be the last one, and any number of collectors may be at work at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import groupby, islice

import structlog
from sqlalchemy.exc import IntegrityError

from app.checkpoints import references
from app.checkpoints.files import MANIFEST
from app.checkpoints.service import snapshot_folder
from app.db import Database, utc_now
from app.settings import Settings
from app.storage.blobs import Blob, BlobMissing, BlobStore

logger = structlog.get_logger(__name__)

SNAPSHOTS = snapshot_folder("").rstrip("/")
FOLDERS = ("bodies", "results")
"""Those of the others whose blobs have a name of their own each. Tokenizers are named by their content, so an old one
may be about to be used again; there are few."""


@dataclass(slots=True)
class Collector:
    """One janitor's collection. `at_once`: blobs looked at, in each folder, and snapshots retired in one round.
    `after`: where in each folder the next round goes on."""

    database: Database
    blobs: BlobStore
    settings: Settings
    at_once: int = 5000
    after: dict[str, str] = field(default_factory=dict)

    def round(self) -> dict[str, int]:
        """Collect once; returns how much of what was deleted."""
        before = utc_now() - timedelta(seconds=self.settings.orphan_grace_s)
        retired = self._retire(before)
        for snapshot_id in retired:
            self._discard(snapshot_id)
        counts = {"retired": len(retired), "snapshots": self._sweep_snapshots(before)}
        for folder in FOLDERS:
            counts[folder] = self._sweep(folder, before)
        counts["unfinished"] = self.blobs.remove_unfinished(before)
        if any(counts.values()):
            logger.info("collected", **counts)
        return counts

    def _retire(self, before: datetime) -> list[str]:
        """Delete the rows of snapshots that have been unused for long."""
        now = utc_now()
        ends = references.Ends(
            silent_before=now - timedelta(seconds=self.settings.session_retention_s),
            idle_before=now - timedelta(seconds=self.settings.ephemeral_idle_s),
        )
        with self.database.read() as session:
            changes = references.changed_snapshots(
                session, self._body, unused_before=before, ends=ends, limit=self.at_once
            )
        if not (changes.used_again or changes.newly_unused or changes.dead):
            return []
        try:
            with self.database.write() as session:
                return references.retire_snapshots(session, self._body, changes, ends=ends)
        except IntegrityError:  # one of them was named at this very moment
            logger.warning("snapshots_not_retired", snapshots=len(changes.dead))
            return []

    def _body(self, key: str) -> bytes:
        try:
            return self.blobs.get(key)
        except BlobMissing:  # pruned meanwhile
            return b""

    def _sweep_snapshots(self, before: datetime) -> int:
        """Delete the files of snapshots that have no row."""
        old = [snapshot_id for snapshot_id, blobs in self._next(SNAPSHOTS) if _are_older(blobs, before)]
        with self.database.read() as session:
            known = references.known_snapshots(session, old) if old else set()
        orphans = [snapshot_id for snapshot_id in old if snapshot_id not in known]
        for snapshot_id in orphans:
            self._discard(snapshot_id)
        return len(orphans)

    def _sweep(self, folder: str, before: datetime) -> int:
        """Delete the blobs of a folder that no row names."""
        old = [blob.key for _, blobs in self._next(folder) for blob in blobs if blob.modified < before]
        with self.database.read() as session:
            named = references.named_blobs(session, folder, old) if old else set()
        orphans = [key for key in old if key not in named]
        for key in orphans:
            self.blobs.delete(key)
        return len(orphans)

    def _next(self, folder: str) -> Iterator[tuple[str, Sequence[Blob]]]:
        """The next of the things in a folder, each with its id and all of its blobs."""
        after = self.after.pop(folder, "")
        listed = list(islice(self.blobs.blobs(folder, after=after), self.at_once))
        groups = [(name, list(blobs)) for name, blobs in groupby(listed, lambda blob: blob.key.split("/")[1])]
        if len(listed) == self.at_once:
            if len(groups) > 1:
                groups.pop()  # its other blobs may not be among these
            self.after[folder] = groups[-1][1][-1].key
        yield from groups

    def _discard(self, snapshot_id: str) -> None:
        """Delete a snapshot's files; without its manifest it is none, from the first moment on."""
        self.blobs.delete(f"{snapshot_folder(snapshot_id)}/{MANIFEST}")
        self.blobs.delete(snapshot_folder(snapshot_id))


def _are_older(blobs: Sequence[Blob], before: datetime) -> bool:
    return max(blob.modified for blob in blobs) < before
