"""Puts finished samples on record before their clients see them (`app.sampling.records`), in a thread of its own, so
that neither the engine nor a sample without a record ever waits for the database.

All that has come in becomes one transaction. While the database is away, samples stay here, claimed, and are tried
again; when their worker goes before that, others sample them again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import structlog
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app.db import Database
from app.sampling.records import NewRecord, record
from app.sampling.store import SampleAnswer

logger = structlog.get_logger(__name__)

_AT_ONCE = 256
_AWAY_S = 0.5

Take = Callable[[str, SampleAnswer], None]
"""Gets a request id and the answer that its client is to see."""


class SampleRecorder:
    """The records that one worker writes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[tuple[NewRecord, Take]] = deque()
        self._bell = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sample-records", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Try once more to write what waits; what cannot be written is never taken."""
        self._stopping.set()
        self._bell.set()
        self._thread.join(timeout_s)

    def put(self, sample: NewRecord, take: Take) -> None:
        """Record a sample, from any thread; `take` is called in the thread of the recorder once that is done."""
        self._waiting.append((sample, take))
        self._bell.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._bell.wait()
            self._bell.clear()
            while self._waiting:
                if not self._write_some():
                    if self._stopping.is_set():
                        return
                    self._stopping.wait(_AWAY_S)

    def _write_some(self) -> bool:
        """Write the oldest that wait. False while the database is away."""
        batch = [self._waiting.popleft() for _ in range(min(_AT_ONCE, len(self._waiting)))]
        try:
            self._write(batch)
        except (OperationalError, InterfaceError, PoolTimeout) as error:
            logger.warning("samples_not_recorded", count=len(batch), error=type(error).__name__)
            self._waiting.extendleft(reversed(batch))
            return False
        return True

    def _write(self, batch: Sequence[tuple[NewRecord, Take]]) -> None:
        try:
            with self._database.write() as session:
                answers = record(session, [sample for sample, _ in batch])
            told = [(take, sample.request_id, answers[sample.request_id]) for sample, take in batch]
        except (OperationalError, InterfaceError, PoolTimeout):
            raise
        except Exception as error:
            if len(batch) > 1:
                for item in batch:
                    self._write([item])
                return
            logger.error("sample_not_recorded", request_id=batch[0][0].request_id, exc_info=error)
            failed = SampleAnswer.failed("the sample could not be recorded; the server's log has the details", "server")
            batch[0][1](batch[0][0].request_id, failed)
            return
        for take, request_id, response in told:
            if response is None:
                text = "seq_id: a sample of another prompt is on record under this number"
                take(request_id, SampleAnswer.failed(text, "user"))
            else:
                take(request_id, SampleAnswer("proto", response))
