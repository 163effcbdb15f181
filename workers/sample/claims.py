"""Keeps the claims of a sampler's requests alive, says that the sampler lives, and hears what was cancelled.

All in one small thread, so that a long prefill loses no claims. A cancellation comes by a notice; one that was missed
shows when the claim is renewed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import structlog
from redis import Redis
from redis.client import PubSub
from redis.exceptions import RedisError

from app.sampling.keys import cancel_channel
from app.sampling.presence import ANNOUNCE_EVERY_S, SamplerPresence
from app.sampling.store import SampleDesk

logger = structlog.get_logger(__name__)

_LISTEN_S = 0.5
_AWAY_S = 0.5


class ClaimKeeper:
    """The claims of one sampler. `running`: the requests that it holds; `cancel`: stop working on one; `load`: the
    sequences that it has to do."""

    def __init__(
        self,
        desk: SampleDesk,
        presence: SamplerPresence,
        redis: Redis,
        *,
        pool: str,
        renew_every_s: float,
        running: Callable[[], set[str]],
        cancel: Callable[[str], None],
        load: Callable[[], int],
    ) -> None:
        self._desk = desk
        self._presence = presence
        self._redis = redis
        self._channel = cancel_channel(pool)
        self._renew_every_s = renew_every_s
        self._running = running
        self._cancel = cancel
        self._load = load
        self._next_renewal = 0.0
        self._next_announcement = 0.0
        self._retired = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sample-claims", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def retire(self) -> None:
        """Say no more that this sampler lives: nobody sends it requests then. Claims are kept."""
        self._retired, self._next_announcement = True, 0.0

    def resume(self) -> None:
        """Say again that this sampler lives."""
        self._retired, self._next_announcement = False, 0.0

    def stop(self, timeout_s: float) -> None:
        """Stop the thread; claims run out unless they are released."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._redis.pubsub(ignore_subscribe_messages=True) as notices:
                    notices.subscribe(self._channel)
                    while not self._stopping.is_set():
                        self._announce()
                        self._renew()
                        self._listen(notices)
            except (RedisError, OSError) as error:
                logger.warning("claims_not_renewed", count=len(self._running()), error=type(error).__name__)
                self._stopping.wait(_AWAY_S)

    def _announce(self) -> None:
        if time.monotonic() < self._next_announcement:
            return
        if self._retired:
            self._presence.leave()
            self._next_announcement = float("inf")
        else:
            self._next_announcement = time.monotonic() + ANNOUNCE_EVERY_S
            self._presence.announce(self._load())

    def _renew(self) -> None:
        if time.monotonic() < self._next_renewal:
            return
        self._next_renewal = time.monotonic() + self._renew_every_s
        if running := self._running():
            self._drop(self._desk.renew(running))

    def _listen(self, notices: PubSub) -> None:
        left_s = max(0.0, min(self._next_renewal, self._next_announcement) - time.monotonic())
        message = notices.get_message(timeout=min(_LISTEN_S, left_s))
        if message is not None:
            self._drop(message["data"].decode().split("\n"))

    def _drop(self, request_ids: Iterable[str]) -> None:
        running = self._running()
        for request_id in request_ids:
            if request_id in running:
                self._cancel(request_id)
