"""Answers that are worth nothing once their client has gone: the work for them ends with the connection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

SILENCE_S = 15.0
"""A stream says something at least so often, so that no proxy takes it for dead."""
_CANCEL_AGAIN_S = 1.0
"""Longer than work needs to tidy up after itself, which a second cancellation would interrupt."""
_DONE = b"data: [DONE]\n\n"
_ALIVE = b": alive\n\n"

Emit = Callable[[object], Awaitable[None]]
"""Sends one event of JSON."""


class ClientGone(Exception):
    """The client has closed its connection, so nobody reads an answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: then ClientGone is raised. The request's body
    has to have been received."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_disconnection(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        await end_all([working, leaving])


async def end_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks until they have ended: a cancellation that meets an answer of Redis can be lost."""
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        _, running = await asyncio.wait(running, timeout=_CANCEL_AGAIN_S)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, written by `produce` and ended by `[DONE]`. `tell`: the last event of a stream that failed;
    status and headers are out by then."""

    media_type = "text/event-stream"

    def __init__(self, produce: Callable[[Emit], Coroutine[Any, Any, None]], tell: Callable[[Exception], object]):
        self._produce = produce
        self._tell = tell
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            await while_connected(receive, self._write(send))
        except ClientGone:
            return
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def _write(self, send: Send) -> None:
        one_at_a_time = asyncio.Lock()

        async def write(part: bytes) -> None:
            async with one_at_a_time:
                await send({"type": "http.response.body", "body": part, "more_body": True})

        async def emit(event: object) -> None:
            await write(b"data: " + orjson.dumps(event) + b"\n\n")

        async def keep_alive() -> None:
            while True:
                await asyncio.sleep(SILENCE_S)
                await write(_ALIVE)

        living = asyncio.create_task(keep_alive())
        try:
            await self._produce(emit)
        except Exception as error:
            await emit(self._tell(error))
        finally:
            living.cancel()
