"""An engine that only loads, a blob store that can be held, and snapshots whose weights are any bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from app.checkpoints.service import snapshot_folder
from app.storage.blobs import LocalBlobStore
from tests.services import wait_for
from workers import snapshot_files
from workers.sample.adapter_files import AdapterFiles
from workers.sample.adapters import AdapterStore
from workers.sample.engines.base import AdapterHandle, Job
from workers.snapshot_files import ADAPTER_FILES
from workers.snapshot_folders import SnapshotFolders

CONFIG, WEIGHTS = ADAPTER_FILES
PLENTY = 2**30


class HeldBlobs(LocalBlobStore):
    """A blob store that keeps those waiting who ask for held snapshots."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked: list[str] = []
        self._held: dict[str, threading.Event] = {}

    def hold(self, snapshot_id: str) -> threading.Event:
        """Nothing of this snapshot is read until the event is set."""
        return self._held.setdefault(snapshot_id, threading.Event())

    def get(self, key: str) -> bytes:
        self._wait(key)
        return super().get(key)

    def stream(self, key: str, *, start: int, length: int) -> Iterator[bytes]:
        self._wait(key)
        return super().stream(key, start=start, length=length)

    def _wait(self, key: str) -> None:
        snapshot_id = key.split("/")[1]
        self.asked.append(snapshot_id)
        if (event := self._held.get(snapshot_id)) is not None:
            assert event.wait(30)


class LoadingEngine:
    """Keeps what it has loaded, by the text of the weights; samples nothing."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.most = 0
        self._lock = threading.Lock()

    def load_adapter(self, snapshot_id: str, folder: Path) -> AdapterHandle:
        with self._lock:
            self.loaded.append((folder / WEIGHTS).read_text())
            self.most = max(self.most, len(self.loaded))
            return self.loaded[-1]

    def unload_adapter(self, handle: AdapterHandle) -> None:
        with self._lock:
            self.loaded.remove(handle)  # type: ignore[arg-type]

    def submit(self, job: Job) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def step(self) -> bool:
        return False

    def on_event(self, wake: Callable[[], None]) -> None: ...

    def close(self) -> None: ...

    running = waiting = 0


class AdapterLab:
    """A store of adapters, and what its requests were told, by request."""

    def __init__(self, folder: Path, *, capacity: int = 2, **options: Any) -> None:
        self.blobs = HeldBlobs(folder / "blobs")
        self.local = SnapshotFolders(folder / "adapters", budget_bytes=PLENTY)
        self.engine = LoadingEngine()
        self.store = AdapterStore(self.engine, AdapterFiles(self.local, self.blobs, **options), capacity=capacity)
        self.told: dict[str, Any] = {}

    def add(self, *snapshot_ids: str) -> None:
        """Snapshots in the blob store, whose weights are their ids."""
        for snapshot_id in snapshot_ids:
            snapshot_files.write(self.blobs, snapshot_id, {CONFIG: b"{}", WEIGHTS: snapshot_id.encode()})

    def damage(self, snapshot_id: str) -> None:
        self.blobs.put(f"{snapshot_folder(snapshot_id)}/{WEIGHTS}", b"x" * len(snapshot_id))

    def ask(self, request_id: str, snapshot_id: str | None) -> None:
        self.store.ask(request_id, snapshot_id, lambda found: self.told.__setitem__(request_id, found))

    def settle(self, condition: Callable[[], object]) -> None:
        """Turn until something is so."""

        def turned() -> object:
            self.store.turn()
            return condition()

        wait_for(turned)

    def heard(self, *request_ids: str) -> None:
        """Turn until these requests have an answer."""
        self.settle(lambda: self.told.keys() >= set(request_ids))

    def idle(self) -> None:
        """Turn until nothing is being loaded."""
        self.settle(lambda: all(resident.folder for resident in self.store._residents.values()))
