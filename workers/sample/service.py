"""The sample service: takes requests off Redis, keeps their claims alive, feeds the engine, stores what comes out.

Celery tasks only drop request ids into the inbox. One thread owns the engine: it claims what arrived in one round trip,
turns the engine, and stores the results of each turn in another. A second, small one (`claims`) renews claims, so that
a long prefill does not lose them, and passes cancellations on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial

import structlog
from redis import Redis
from redis.exceptions import RedisError

from app.errors import InvalidRequest
from app.sampling.records import NewRecord
from app.sampling.store import MAX_CLAIMS, Claimed, SampleAnswer, SampleDesk
from app.settings import Settings
from app.wire.sampling import StoredSample, decode_stored, encode_result
from app.wire.types import SampleResult
from workers.sample.adapters import AdapterCache
from workers.sample.claims import ClaimKeeper
from workers.sample.engines.base import Cancelled, Engine, Job
from workers.sample.recorder import SampleRecorder
from workers.sample.streams import TokenStreams
from workers.sample.usage import SampleUsage
from workers.threads import use_threads
from workers.train.snapshots import BadSnapshot

logger = structlog.get_logger(__name__)

_LOOK_EVERY_S = 2.0
_IDLE_WAIT_S = 0.5


class SampleService:
    """The samples of one worker."""

    def __init__(
        self,
        *,
        worker_id: str,
        pool: str,
        engine: Engine,
        adapters: AdapterCache,
        usage: SampleUsage,
        recorder: SampleRecorder,
        redis: Redis,
        settings: Settings,
        threads: int = 1,
    ) -> None:
        self._engine = engine
        self._adapters = adapters
        self._usage = usage
        self._recorder = recorder
        self._settings = settings
        self._threads = threads
        self._desk = SampleDesk(
            redis, pool=pool, worker_id=worker_id, claim_s=settings.sample_claim_s, result_ttl_s=settings.sample_ttl_s
        )
        self._streams = TokenStreams(redis)
        self._inbox: deque[str] = deque()
        self._running: set[str] = set()
        self._finished: list[tuple[str, SampleAnswer]] = []
        self._recorded: deque[tuple[str, SampleAnswer]] = deque()
        self._bell = threading.Event()
        self._stopping = threading.Event()
        self._next_look = 0.0
        self._thread = threading.Thread(target=self._run, name="sample", daemon=True)
        self._claims = ClaimKeeper(
            self._desk,
            redis,
            pool=pool,
            renew_every_s=settings.sample_claim_s / 3,
            running=self._running.copy,
            cancel=self._cancel,
        )

    def start(self) -> None:
        """Start the threads."""
        self._usage.start()
        self._recorder.start()
        self._thread.start()
        self._claims.start()

    def take(self, request_id: str) -> None:
        """A request waits in Redis; returns at once."""
        self._inbox.append(request_id)
        self._bell.set()

    def _cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)
        self._bell.set()

    def stop(self, timeout_s: float) -> None:
        """Stop turning the engine; running requests go back, for another sampler to take."""
        self._stopping.set()
        self._bell.set()
        self._thread.join(timeout_s)
        self._claims.stop(timeout_s)
        self._usage.stop(timeout_s)
        self._recorder.stop(timeout_s)
        try:
            self._desk.finish([*self._finished, *self._recorded])
            self._desk.release(sorted(self._running))
        except (RedisError, OSError) as error:
            logger.warning("claims_not_released", error=type(error).__name__)

    def _run(self) -> None:
        use_threads(self._threads)
        while not self._stopping.is_set():
            try:
                self._receive()
                worked = self._engine.step()
                self._streams.publish()
                self._store_finished()
            except (RedisError, OSError) as error:
                logger.warning("sample_store_away", error=type(error).__name__)
                self._stopping.wait(_IDLE_WAIT_S)
            except Exception as error:
                logger.error("sample_turn_failed", exc_info=error)
                self._stopping.wait(_IDLE_WAIT_S)
            else:
                if not worked and not self._inbox:
                    self._bell.wait(_IDLE_WAIT_S)
                self._bell.clear()

    def _receive(self) -> None:
        arrived = []
        while self._inbox:
            arrived.append(self._inbox.popleft())
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            arrived += self._desk.abandoned(older_than_s=_LOOK_EVERY_S)
        wanted = [request_id for request_id in dict.fromkeys(arrived) if request_id not in self._running]
        if wanted:
            for claimed in self._desk.claim(wanted):
                self._submit(claimed)

    def _submit(self, claimed: Claimed) -> None:
        request_id = claimed.request_id
        self._running.add(request_id)
        if claimed.attempt > MAX_CLAIMS:
            text = "sampling was begun several times and its worker died each time, so it was given up"
            self._finish(request_id, SampleAnswer.failed(text, "server"))
            return
        try:
            stored = decode_stored(claimed.body)
            adapter = self._adapters.get(stored.snapshot_id)
        except Exception as error:
            self._deliver(request_id, error)
            return
        keep = partial(self._record, stored) if stored.request.record else partial(self._deliver, request_id)
        deliver = self._usage.counted(stored, keep)
        on_token = self._streams.listener(request_id) if stored.stream else None
        self._engine.submit(Job(stored.request, adapter, deliver, on_token))

    def _deliver(self, request_id: str, outcome: SampleResult | Exception) -> None:
        if isinstance(outcome, SampleResult):
            answer = SampleAnswer("proto", encode_result(outcome))
        elif isinstance(outcome, Cancelled | InvalidRequest | BadSnapshot):
            answer = SampleAnswer.failed(str(outcome), "user")
        else:
            logger.error("sample_failed", request_id=request_id, exc_info=outcome)
            text = f"sampling failed on the server ({type(outcome).__name__}); its log has the details"
            answer = SampleAnswer.failed(text, "server")
        self._finish(request_id, answer)

    def _record(self, stored: StoredSample, outcome: SampleResult | Exception) -> None:
        """Deliver a result once it is on record."""
        request = stored.request
        if not isinstance(outcome, SampleResult):
            self._deliver(request.request_id, outcome)
            return
        response = encode_result(outcome)
        sample = NewRecord(request.request_id, stored.owner_id, stored.session_id, request.prompt, response)
        self._recorder.put(sample, self._take_recorded)

    def _take_recorded(self, request_id: str, answer: SampleAnswer) -> None:
        self._recorded.append((request_id, answer))
        self._bell.set()

    def _finish(self, request_id: str, answer: SampleAnswer) -> None:
        self._finished.append((request_id, answer))

    def _store_finished(self) -> None:
        while self._recorded:
            self._finished.append(self._recorded.popleft())
        if not self._finished:
            return
        self._desk.finish(self._finished)
        self._running.difference_update(request_id for request_id, _ in self._finished)
        self._finished = []
