"""What has become of samples, on its way into Redis: the outcomes of a turn go there in one round trip."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import structlog

from app.errors import InvalidRequest
from app.sampling.records import NewRecord
from app.sampling.store import SampleAnswer, SampleDesk
from app.wire.sampling import StoredSample, encode_result
from app.wire.types import SampleResult
from workers.sample.engines.base import Cancelled
from workers.sample.recorder import SampleRecorder
from workers.snapshot_files import BadSnapshot

logger = structlog.get_logger(__name__)


class Outbox:
    """The outcomes of one sampler. Used by the thread that turns the engine; `wake` is called, by another thread, when
    `store` has something new to do."""

    def __init__(self, desk: SampleDesk, recorder: SampleRecorder, *, wake: Callable[[], None]) -> None:
        self._desk = desk
        self._recorder = recorder
        self._wake = wake
        self._finished: list[tuple[str, SampleAnswer]] = []
        self._recorded: deque[tuple[str, SampleAnswer]] = deque()
        self._dropped: list[str] = []
        self._over: set[str] = set()

    def deliver(self, request_id: str, outcome: SampleResult | Exception) -> None:
        """A request is over. What has become of one that was cancelled, Redis knows already."""
        if isinstance(outcome, Cancelled):
            self.drop(request_id)
            return
        if isinstance(outcome, SampleResult):
            answer = SampleAnswer("proto", encode_result(outcome))
        elif isinstance(outcome, InvalidRequest | BadSnapshot):
            answer = SampleAnswer.failed(str(outcome), "user")
        else:
            logger.error("sample_failed", request_id=request_id, exc_info=outcome)
            text = f"sampling failed on the server ({type(outcome).__name__}); its log has the details"
            answer = SampleAnswer.failed(text, "server")
        self._finished.append((request_id, answer))

    def record(self, stored: StoredSample, outcome: SampleResult | Exception) -> None:
        """Deliver a result once it is on record."""
        request = stored.request
        if not isinstance(outcome, SampleResult):
            self.deliver(request.request_id, outcome)
            return
        response = encode_result(outcome)
        sample = NewRecord(request.request_id, stored.owner_id, stored.session_id, request.prompt, response)
        self._recorder.put(sample, self._take_recorded)

    def _take_recorded(self, request_id: str, answer: SampleAnswer) -> None:
        self._recorded.append((request_id, answer))
        self._wake()

    def fail(self, request_id: str, text: str) -> None:
        """A request cannot be served, for a reason that is ours."""
        self._finished.append((request_id, SampleAnswer.failed(text, "server")))

    def drop(self, request_id: str) -> None:
        """Nobody wants this request any more."""
        self._dropped.append(request_id)

    def store(self) -> set[str]:
        """Send what is there; returns which requests are over. Raises RedisError; what was not sent stays."""
        while self._recorded:
            self._finished.append(self._recorded.popleft())
        if self._finished:
            self._desk.finish(self._finished)
            self._over.update(request_id for request_id, _ in self._finished)
            self._finished = []
        if self._dropped:
            self._desk.release(self._dropped)
            self._over.update(self._dropped)
            self._dropped = []
        over, self._over = self._over, set()
        return over
