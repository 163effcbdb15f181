"""Middleware: no request body larger than the limit is ever held in memory."""

from __future__ import annotations

import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.compat.errors import error_response, is_compat
from app.errors import TooLarge
from app.responses import json_response
from app.wire.decompress import too_large


class BodyLimit:
    """Answers 413 to a body over `limit` bytes, by its Content-Length or, without one, as it arrives."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._limit:
            await self._refuse(scope, receive, send)
            return
        received, started = 0, False

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                raise too_large(self._limit)
            return message

        async def guarded(message: Message) -> None:
            nonlocal started
            if started or received <= self._limit:  # else it is what a framework made of our error; the answer is ours
                started = True
                await send(message)

        with contextlib.suppress(TooLarge):
            await self._app(scope, counted, guarded)
        if received > self._limit and not started:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = too_large(self._limit)
        if is_compat(scope["path"]):
            await error_response(error.status, error.detail)(scope, receive, send)
        else:
            await json_response({"detail": error.detail}, status_code=error.status)(scope, receive, send)
