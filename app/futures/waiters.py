"""Waiting without polling: one Redis subscription per API process wakes the polls that wait here.

A poll registers first and checks then, so no completion falls between. Notices can be lost (Redis restarts, a worker
dies after its commit), so every `SWEEP_S`, and after every new subscription, one look at the stores wakes whoever is
due. No waiter holds a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from app.sampling.keys import feed_of

log = structlog.get_logger(__name__)

DONE_CHANNEL = "tinworks:done"
"""Redis channel of completion notices: request ids, one per line. A streamed sample is named whenever it has grown."""

SWEEP_S = 2.0
_REMEMBERED = 20_000
_STOP_AGAIN_S = 0.2
V = TypeVar("V")

FindFinished = Callable[[Sequence[str]], Awaitable[set[str]]]


@dataclass(frozen=True, slots=True)
class Listener:
    """Somebody else who hears notices by the same subscription: lines of text on a channel of his own. `recover` is
    awaited after every new subscription: notices, or all that Redis held, may have been lost."""

    channel: str
    hear: Callable[[list[str]], None]
    recover: Callable[[], Awaitable[None]]


class Waiters:
    """The polls that wait in this process, by request id, or by the feed that tells of many requests."""

    def __init__(self, redis: Redis, find_finished: FindFinished, listeners: Sequence[Listener] = ()) -> None:
        self._redis = redis
        self._find_finished = find_finished
        self._listeners = {listener.channel: listener for listener in listeners}
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._expected: OrderedDict[str, str] = OrderedDict()
        self._announced: OrderedDict[str, None] = OrderedDict()
        self.stopping = False

    def start(self) -> None:
        """Begin to listen; call on the running event loop."""
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._sweep())]

    async def stop(self) -> None:
        """Stop listening and wake everybody, so that polls answer 408 and the process can end."""
        self.stopping = True
        running = set(self._tasks)
        while running:  # a cancellation that meets a connection in the making can be lost
            for task in running:
                task.cancel()
            _, running = await asyncio.wait(running, timeout=_STOP_AGAIN_S)
        self.release()

    def release(self) -> None:
        """Let every poll answer what it has, for most of them 408, and no new one wait."""
        self.stopping = True
        self.wake(list(self._waiting))

    @property
    def count(self) -> int:
        """How many polls wait."""
        return sum(map(len, tuple(self._waiting.values())))

    def expect(self, request_id: str, owner_id: str) -> None:
        """This process has just accepted the request: until its notice comes, a poll need not look it up to wait."""
        if request_id not in self._announced:
            _remember(self._expected, request_id, owner_id)

    def is_expected(self, request_id: str, owner_id: str) -> bool:
        """Whether the owner's future was accepted here and no notice of it has come since."""
        return self._expected.get(request_id) == owner_id

    @contextlib.contextmanager
    def waiting_for(self, name: str) -> Iterator[asyncio.Event]:
        """An event that is set once the future may be done, or the feed have news."""
        event = asyncio.Event()
        self._waiting.setdefault(name, set()).add(event)
        try:
            yield event
        finally:
            events = self._waiting[name]
            events.discard(event)
            if not events:
                del self._waiting[name]

    def wake(self, names: Sequence[str]) -> None:
        """Wake the polls of these futures, of the feeds that they belong to, and of these feeds."""
        for name in names:
            self._expected.pop(name, None)
            _remember(self._announced, name, None)
            for waiting in (name, feed_of(name)):
                for event in self._waiting.get(waiting, ()):
                    event.set()

    def _hear(self, channel: str, lines: list[str]) -> None:
        if channel == DONE_CHANNEL:
            self.wake(lines)
        else:
            self._listeners[channel].hear(lines)

    async def _listen(self) -> None:
        while True:
            try:
                async with self._redis.pubsub() as channel:
                    await channel.subscribe(DONE_CHANNEL, *self._listeners)
                    self._expected.clear()
                    for listener in self._listeners.values():
                        await listener.recover()
                    await self._wake_finished()
                    async for message in channel.listen():
                        if message["type"] == "message":
                            self._hear(message["channel"].decode(), message["data"].decode().split("\n"))
            except (RedisError, OSError) as error:
                self._expected.clear()
                log.warning("subscription_lost", error=type(error).__name__)
                await asyncio.sleep(0.5)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            await self._wake_finished()

    async def _wake_finished(self) -> None:
        waiting = list(self._waiting)
        if not waiting:
            return
        try:
            self.wake(list(await self._find_finished(waiting)))
        except Exception as error:  # an outage of a store: the next turn looks again
            log.warning("sweep_failed", error=type(error).__name__)


def _remember(known: OrderedDict[str, V], key: str, value: V) -> None:
    known[key] = value
    if len(known) > _REMEMBERED:
        known.popitem(last=False)
