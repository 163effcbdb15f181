"""Files on their way into the blob store: on the disk, so that they take no memory beside what they are made of."""

from __future__ import annotations

import errno
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from app.errors import StorageUnavailable

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LEFTOVER_S = 86400.0


class Spool:
    """Folders below `root`, each for as long as its block. Several workers may share the root."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._remove_leftovers()

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """An empty folder. Raises StorageUnavailable if the disk is full when it is made or while it is filled."""
        with told_when_full():
            self._root.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._root) as name:
                yield Path(name)

    def _remove_leftovers(self) -> None:
        """Remove what processes that were killed have left."""
        with suppress(FileNotFoundError):
            for path in self._root.iterdir():
                with suppress(OSError):
                    if path.stat().st_mtime < time.time() - _LEFTOVER_S:
                        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def told_when_full() -> Iterator[None]:
    """A full disk of this worker as what clients can be told: StorageUnavailable."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StorageUnavailable("the worker's disk is full") from error
    except SafetensorError as error:
        if not any(f"os error {number}" in str(error) for number in _FULL):
            raise
        raise StorageUnavailable("the worker's disk is full") from error
