"""What finished samples used, counted in memory and written every second, so that no sample waits for the database."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog
from sqlalchemy.exc import SQLAlchemyError

from app.billing import meter
from app.billing.meter import Meter, UsageKind
from app.db import Database
from app.telemetry.traces import record
from app.wire.sampling import StoredSample
from app.wire.types import SampleResult
from workers.metrics import count_sample

logger = structlog.get_logger(__name__)

Deliver = Callable[[SampleResult | Exception], None]
_WRITE_EVERY_S = 1.0


class SampleUsage:
    """Counts the samples of one worker. What it has counted and not written dies with its process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._counts: dict[Meter, int] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sample-usage", daemon=True)

    def start(self) -> None:
        """Start the thread that writes."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Write what is left."""
        self._stopping.set()
        self._thread.join(timeout_s)
        self.write()

    def counted(self, stored: StoredSample, deliver: Deliver) -> Deliver:
        """`deliver`, which also counts what the sample has used, if it gave a result."""

        began = time.monotonic()

        def count_and_deliver(outcome: SampleResult | Exception) -> None:
            deliver(outcome)
            seconds, tokens = time.monotonic() - began, len(stored.request.prompt)
            record("sample", stored.request.request_id, seconds, pool=stored.pool, prompt_tokens=tokens)
            count_sample(outcome, prompt_tokens=len(stored.request.prompt))
            if isinstance(outcome, SampleResult):
                self.count(stored, outcome)

        return count_and_deliver

    def count(self, stored: StoredSample, result: SampleResult) -> None:
        """Count a finished sample."""
        cached = result.prompt_cache_hit_tokens
        used: dict[UsageKind, int] = {
            "prefill": len(stored.request.prompt) - cached,
            "prefill_cached": cached,
            "sample": sum(len(sequence.tokens) for sequence in result.sequences),
        }
        hour = meter.this_hour()
        base_model = stored.base_model or stored.pool
        self._add(
            {Meter(stored.owner_id, hour, stored.session_id, base_model, kind): amount for kind, amount in used.items()}
        )

    def write(self) -> None:
        """Write what was counted; what cannot be written now stays counted."""
        with self._lock:
            counts, self._counts = self._counts, {}
        if not counts:
            return
        try:
            with self._database.write() as session:
                meter.add(session, counts)
        except SQLAlchemyError as error:
            logger.warning("usage_not_written", meters=len(counts), error=type(error).__name__)
            self._add(counts)

    def _add(self, counts: dict[Meter, int]) -> None:
        with self._lock:
            self._counts = meter.summed([*self._counts.items(), *counts.items()])

    def _run(self) -> None:
        while not self._stopping.wait(_WRITE_EVERY_S):
            self.write()
