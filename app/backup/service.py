"""`tinworks backup` and `tinworks restore`.

The blobs are copied first, which takes long; then the tables, in one transaction, and what they name that is not copied
yet. A blob that has gone between the two is one that was replaced, as recovery snapshots are all the time: then the
tables are read once more, and name the newer one. So nothing has to stop for a backup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, delete, func, select, update

from app.accounts.models import Owner
from app.backup import tables
from app.checkpoints.files import MANIFEST
from app.checkpoints.service import snapshot_folder
from app.db import Base, Database, utc_now
from app.runs.models import Run
from app.storage.blobs import BlobMissing, BlobStore

FORMAT = 1
FOLDERS = ("tokenizers", "snapshots", "bodies", "results")
_TRIES = 5
_CATALOGUE = "backup.json"
Say = Callable[[str], None]


class BackupFailed(Exception):
    """It cannot be done; the text says why, and what would help."""


@dataclass(slots=True)
class _Named:
    """The blobs that rows name: single ones, and snapshots, which are folders."""

    blobs: set[str] = field(default_factory=set)
    snapshots: set[str] = field(default_factory=set)
    uploading: set[str] = field(default_factory=set)

    def see(self, table: str, row: dict[str, Any]) -> None:
        """Take note of what a row names."""
        for column in ("body_blob", "result_blob", "tokenizer_blob"):
            if row.get(column):
                self.blobs.add(row[column])
        if table == "snapshots":
            self.snapshots.add(row["id"])
        elif table == "uploads":
            self.uploading.add(row["snapshot_id"])


def backup(database: Database, blobs: BlobStore, folder: Path, *, say: Say) -> None:
    """Write all of an installation into `folder`, while it works. A second backup into the same folder copies only what
    is new. Raises BackupFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    copied = _copy_all(blobs, folder)
    say(f"{copied} blobs copied")
    for _ in range(_TRIES):
        named, counts, revision = _dump(database, folder)
        missing = list(_copy_named(named, blobs, folder))
        if not missing:
            break
        say(f"{len(missing)} blobs were replaced meanwhile; reading the tables again")
    else:
        raise BackupFailed(
            f"{missing[0]} and {len(missing) - 1} more blobs are named by rows and not in the blob store"
        )
    catalogue = {"format": FORMAT, "revision": revision, "taken_at": utc_now(), "rows": counts}
    (folder / _CATALOGUE).write_bytes(orjson.dumps(catalogue, option=orjson.OPT_INDENT_2))
    say(f"{sum(counts.values())} rows of {len(counts)} tables, revision {revision}")


def _dump(database: Database, folder: Path) -> tuple[_Named, dict[str, int], str | None]:
    named, counts = _Named(), {}
    engine = database.engine
    if not database.is_sqlite:
        engine = engine.execution_options(isolation_level="REPEATABLE READ")
    with engine.connect() as connection, connection.begin():
        revision = MigrationContext.configure(connection).get_current_revision()
        for table in tables.tables():
            name = str(table.name)
            path = tables.path_of(folder, table)
            counts[name] = tables.dump(connection, table, path, see=partial(named.see, name))
    return named, counts, revision


def _copy_all(blobs: BlobStore, folder: Path) -> int:
    count = 0
    for kind in FOLDERS:
        for blob in blobs.blobs(kind):
            count += _copy(blobs, blob.key, folder)
    return count


def _copy_named(named: _Named, blobs: BlobStore, folder: Path) -> Iterator[str]:
    """Copy what rows name and is not there yet; yields what the store does not have."""
    for key in named.blobs:
        if not _path(folder, key).exists() and not _copy(blobs, key, folder):
            yield key
    for snapshot_id in named.snapshots - named.uploading:
        place = snapshot_folder(snapshot_id)
        if not _path(folder, f"{place}/{MANIFEST}").exists():
            for key in blobs.list(place):
                _copy(blobs, key, folder)
            if not _path(folder, f"{place}/{MANIFEST}").exists():
                yield place


def _copy(blobs: BlobStore, key: str, folder: Path) -> bool:
    """Whether a blob was copied: one that is there already, or has gone meanwhile, was not."""
    path = _path(folder, key)
    if path.exists():
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".copy-{path.name}")
    try:
        with temporary.open("wb") as file:
            for piece in blobs.stream(key, start=0, length=blobs.size(key)):
                file.write(piece)
    except BlobMissing:
        temporary.unlink(missing_ok=True)
        return False
    temporary.rename(path)
    return True


def _path(folder: Path, key: str) -> Path:
    return folder / "blobs" / key


def restore(database: Database, blobs: BlobStore, folder: Path, *, say: Say) -> None:
    """Fill an empty, migrated installation with a backup. Raises BackupFailed."""
    try:
        catalogue = orjson.loads((folder / _CATALOGUE).read_bytes())
    except (OSError, ValueError) as error:
        raise BackupFailed(
            f"{folder / _CATALOGUE} cannot be read: this is no backup, or one that was cut off"
        ) from error
    if catalogue["format"] != FORMAT:
        raise BackupFailed(f"the backup has format {catalogue['format']}, this version reads {FORMAT}")
    with database.engine.connect() as connection:
        _check_target(connection, catalogue["revision"])
    count = 0
    for path in sorted(path for path in (folder / "blobs").rglob("*") if path.is_file()):
        if not path.name.startswith(".copy-"):
            blobs.put(str(path.relative_to(folder / "blobs")), path)
            count += 1
    say(f"{count} blobs restored")
    with database.write() as session:
        connection = session.connection()
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(delete(table))  # what migrations have made
        for table in tables.tables():
            tables.load(connection, table, tables.path_of(folder, table))
        session.execute(update(Run).values(worker_id=None, lease_expires_at=None))
    say(f"{sum(catalogue['rows'].values())} rows restored")


def _check_target(connection: Connection, revision: str | None) -> None:
    current = MigrationContext.configure(connection).get_current_revision()
    if current != revision:
        raise BackupFailed(
            f"the database is at revision {current}, the backup was taken at {revision}: restore with the version of "
            "Tinworks that took it, and upgrade then"
        )
    if connection.scalar(select(func.count()).select_from(Owner)):
        raise BackupFailed("the database is not empty: restore into a new one, after `tinworks migrate`")
