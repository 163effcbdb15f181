"""Large request bodies on their way into the blob store while the request is still being checked.

Writing and hashing 5 MB takes as long as checking it, and needs the interpreter as little as the checks need the disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from app.runs.log import Payload
from app.settings import Settings
from app.storage.blobs import BlobStore

FOLDER = "bodies"
_THREADS = 4


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Body:
    """A body that may be in the store already when it is accepted."""

    def __init__(self, data: bytes, store: BodyStore) -> None:
        self.data = data
        self._store = store
        self._early: Future[Payload] | None = None
        self._hash: Future[str] | None = None
        self._taken = False

    def fingerprint(self) -> str:
        """SHA-256 of the body."""
        return self._hash.result() if self._hash else _sha256(self.data)

    def payload(self) -> Payload:
        """The stored body, durable before any row names it."""
        self._taken = True
        return self._early.result() if self._early else self._store.keep(self.data)

    def _begin(self, threads: ThreadPoolExecutor) -> None:
        self._hash = threads.submit(_sha256, self.data)
        self._early = threads.submit(self._store.keep, self.data)

    def _drop_if_unused(self) -> None:
        early = None if self._taken else self._early
        if early is None or early.exception() is not None:  # nothing is stored, and nobody needs it
            return
        if (blob := early.result().blob) is not None:
            self._store.blobs.delete(blob)


class BodyStore:
    """Where one API process stores bodies: in the row up to `settings.inline_bytes`, else in `blobs`."""

    def __init__(self, blobs: BlobStore, settings: Settings) -> None:
        self.blobs = blobs
        self._settings = settings
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="bodies")

    def keep(self, data: bytes) -> Payload:
        """Store a body now."""
        return Payload.store(data, self.blobs, folder=FOLDER, inline_bytes=self._settings.inline_bytes)

    @contextmanager
    def begin(self, data: bytes) -> Iterator[Body]:
        """A body that is stored while the block checks it, and removed after it unless `payload` was asked for."""
        body = Body(data, self)
        if len(data) > self._settings.inline_bytes:
            body._begin(self._threads)
        try:
            yield body
        finally:
            body._drop_if_unused()
