"""The sample service: takes requests off Redis, keeps their claims alive, feeds the engine, stores what comes out.

Celery tasks only drop request ids into the inbox. One thread owns the engine: it claims what arrived in one round trip,
lets requests begin in turn (`feeding`), asks for their adapters (`adapters`, which loads them meanwhile), hands the
engine what has its adapter, turns it, and stores the results of each turn in another round trip. A second, small one
(`claims`) renews claims, so that neither a long prefill nor a long load loses them, and passes cancellations on.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

import structlog
from redis import Redis
from redis.exceptions import RedisError

from app.sampling.presence import SamplerPresence
from app.sampling.store import MAX_CLAIMS, Claimed, SampleDesk
from app.settings import Settings
from app.wire.sampling import NewerSample, StoredSample, decode_stored
from app.wire.types import SampleResult
from workers.metrics import SEQUENCES
from workers.sample.adapters import AdapterStore
from workers.sample.claims import ClaimKeeper
from workers.sample.engines.base import AdapterHandle, Engine, Job
from workers.sample.feeding import Feeder
from workers.sample.outbox import Outbox
from workers.sample.recorder import SampleRecorder
from workers.sample.streams import TokenStreams
from workers.sample.usage import Deliver, SampleUsage
from workers.threads import use_threads

logger = structlog.get_logger(__name__)

_LOOK_EVERY_S = 0.5
_UNCLAIMED_S = 1.0
"""A request that its home has not claimed for so long is anybody's."""
_TAKE_AT_LEAST = 64
"""So many requests that nobody claims are taken at a look, however much waits here: they may be other tenants'."""
_LEFT_S = 60.0
"""So long a request that only a newer release can read is left to its samplers."""
_SHARE_EVERY_S = 3.0
_IDLE_WAIT_S = 0.5
_LOADS_END_S = 1.0


class SampleService:
    """The samples of one worker."""

    def __init__(
        self,
        *,
        worker_id: str,
        pool: str,
        engine: Engine,
        adapters: AdapterStore,
        usage: SampleUsage,
        recorder: SampleRecorder,
        redis: Redis,
        settings: Settings,
        threads: int = 1,
        copies: int = 1,
    ) -> None:
        """`copies`: of the model, each of which runs `max_running_sequences` at a time."""
        self._engine = engine
        self._adapters = adapters
        self._usage = usage
        self._recorder = recorder
        self._settings = settings
        self._threads = threads
        self._desk = SampleDesk(
            redis, pool=pool, worker_id=worker_id, claim_s=settings.sample_claim_s, result_ttl_s=settings.sample_ttl_s
        )
        self._presence = SamplerPresence(redis, pool=pool, worker_id=worker_id)
        self._feeder = Feeder(self._desk, engine, rows=copies * settings.max_running_sequences, begin=self._ask)
        self._streams = TokenStreams(redis)
        self._inbox: deque[str] = deque()
        self._cancelled: deque[str] = deque()
        self._running: set[str] = set()
        self._bell = threading.Event()
        self._outbox = Outbox(self._desk, recorder, wake=self._bell.set)
        self._stopping = threading.Event()
        self._retiring = threading.Event()
        self._drained: SimpleQueue[None] = SimpleQueue()
        """Of all ways to wake a thread the one that a signal's handler may use whatever it has interrupted."""
        self._left: dict[str, float] = {}  # requests that are left to samplers of a newer release, until when
        self._next_look = 0.0
        self._next_sharing = 0.0
        self._thread = threading.Thread(target=self._run, name="sample", daemon=True)
        self._claims = ClaimKeeper(
            self._desk,
            self._presence,
            redis,
            pool=pool,
            renew_every_s=settings.sample_claim_s / 3,
            running=self._running.copy,
            cancel=self._cancel,
            load=self._measured_load,
        )
        engine.on_event(self._bell.set)
        adapters.on_event(self._bell.set)

    def start(self) -> None:
        """Start the threads."""
        self._usage.start()
        self._recorder.start()
        self._thread.start()
        self._claims.start()

    def _measured_load(self) -> int:
        """Sequences that this sampler has to do."""
        load, running = self._feeder.load, self._engine.running
        SEQUENCES.labels("engine").set(running)
        SEQUENCES.labels("waiting").set(max(0, load - running))
        return load

    def take(self, request_ids: Iterable[str]) -> None:
        """Requests wait in Redis; returns at once."""
        self._inbox.extend(request_ids)
        self._bell.set()

    def _cancel(self, request_id: str) -> None:
        self._cancelled.append(request_id)
        self._bell.set()

    def retire(self) -> None:
        """Begin nothing more: what waits goes back at once, for another sampler to take; what has begun goes on."""
        self._retiring.set()
        self._claims.retire()
        self._bell.set()

    def resume(self) -> None:
        """Take requests again, after `retire`."""
        self._retiring.clear()
        with suppress(Empty):
            while True:
                self._drained.get_nowait()
        self._claims.resume()
        self._bell.set()

    @property
    def is_busy(self) -> bool:
        """Whether it holds any request."""
        return bool(self._running)

    def hurry(self) -> None:
        """Wait no longer for what has begun. A signal's handler may call it."""
        self._drained.put(None)

    def stop(self, timeout_s: float, *, drain_s: float = 0.0) -> None:
        """Stop turning the engine, once what has begun is done or `drain_s` seconds are over; the rest goes back."""
        if drain_s > 0:
            self.retire()
            with suppress(Empty):
                self._drained.get(timeout=drain_s)
        self._stopping.set()
        self._bell.set()
        self._thread.join(timeout_s)
        self._claims.stop(timeout_s)
        self._adapters.stop(min(timeout_s, _LOADS_END_S))
        self._engine.close()
        self._usage.stop(timeout_s)
        self._recorder.stop(timeout_s)
        try:
            self._presence.leave()
            self._running.difference_update(self._outbox.store())
            self._give_up(self._feeder.surplus())
            self._desk.release(sorted(self._running))
        except (RedisError, OSError) as error:
            logger.warning("claims_not_released", error=type(error).__name__)

    def _run(self) -> None:
        use_threads(self._threads)
        while not self._stopping.is_set():
            try:
                self._receive()
                self._feeder.feed()
                self._adapters.turn()
                worked = self._engine.step()
                self._streams.publish()
                self._running.difference_update(self._outbox.store())
            except (RedisError, OSError) as error:
                logger.warning("sample_store_away", error=type(error).__name__)
                self._stopping.wait(_IDLE_WAIT_S)
            except Exception as error:
                logger.error("sample_turn_failed", exc_info=error)
                self._stopping.wait(_IDLE_WAIT_S)
            else:
                if self._retiring.is_set() and not self._running and self._drained.empty():
                    self._drained.put(None)
                if not worked and not self._inbox:
                    self._bell.wait(_IDLE_WAIT_S)
                self._bell.clear()

    def _receive(self) -> None:
        while self._cancelled:
            request_id = self._cancelled.popleft()
            if self._feeder.remove(request_id):
                self._outbox.drop(request_id)
            elif not self._adapters.cancel(request_id):
                self._engine.cancel(request_id)
        arrived = []
        while self._inbox:
            arrived.append(self._inbox.popleft())
        if self._retiring.is_set():
            self._give_up(self._feeder.surplus())
            return
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            self._left = {request_id: until for request_id, until in self._left.items() if until > now}
            some = max(_TAKE_AT_LEAST, self._feeder.room)
            arrived += self._desk.abandoned(older_than_s=_UNCLAIMED_S, limit=some)
        wanted = [one for one in dict.fromkeys(arrived) if one not in self._running and one not in self._left]
        if wanted:
            self._take_in(self._desk.claim(wanted))
        if self._feeder.waiting and now >= self._next_sharing:
            self._next_sharing = now + _SHARE_EVERY_S
            self._give_up(self._feeder.surplus(among=self._presence.loads()))

    def _take_in(self, claimed: Sequence[Claimed]) -> None:
        newer: list[str] = []
        for request in claimed:
            self._running.add(request.request_id)
            if request.attempt > MAX_CLAIMS:
                text = "sampling was begun several times and its worker died each time, so it was given up"
                self._outbox.fail(request.request_id, text)
                continue
            try:
                self._feeder.add(decode_stored(request.body))
            except NewerSample:
                newer.append(request.request_id)
            except Exception as error:
                self._outbox.deliver(request.request_id, error)
        self._leave(newer)
        self._feeder.feed()
        self._feeder.park(request.request_id for request in claimed if request.request_id not in newer)

    def _leave(self, request_ids: Sequence[str]) -> None:
        """Leave requests to samplers of a newer release."""
        if request_ids:
            logger.warning("left_to_newer_release", count=len(request_ids))
            self._left |= dict.fromkeys(request_ids, time.monotonic() + _LEFT_S)
            self._running.difference_update(request_ids)
            self._desk.release(request_ids)

    def _give_up(self, request_ids: Sequence[str]) -> None:
        if request_ids:
            self._running.difference_update(request_ids)
            self._feeder.give_up(request_ids)

    def _ask(self, stored: StoredSample) -> None:
        self._adapters.ask(stored.request.request_id, stored.snapshot_id, partial(self._begin, stored))

    def _begin(self, stored: StoredSample, adapter: AdapterHandle | Exception | None) -> None:
        """A request's adapter is there, or will not be."""
        request_id = stored.request.request_id
        if isinstance(adapter, Exception):
            self._feeder.ended(request_id, adapter)
            self._outbox.deliver(request_id, adapter)
            return
        self._feeder.in_engine(request_id)
        outbox = self._outbox
        keep = partial(outbox.record, stored) if stored.request.record else partial(outbox.deliver, request_id)
        deliver = partial(self._end, request_id, self._usage.counted(stored, keep))
        on_token = self._streams.listener(request_id) if stored.stream else None
        self._engine.submit(Job(stored.request, adapter, deliver, on_token))

    def _end(self, request_id: str, deliver: Deliver, outcome: SampleResult | Exception) -> None:
        self._adapters.release(request_id)
        self._feeder.ended(request_id, outcome)
        deliver(outcome)
