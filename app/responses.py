"""Answers with a Content-Length, never compressed (WIRE §0.11): JSON, and payloads of any size."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_SENT_AT_ONCE = 256 * 2**10


def json_response(content: Any, *, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as JSON."""
    return Response(orjson.dumps(content), status_code=status_code, headers=headers, media_type="application/json")


class PayloadResponse(Response):
    """Bytes in pieces, which are never put together. Others get the event loop between any two parts of a large one."""

    def __init__(self, pieces: Sequence[bytes], *, media_type: str) -> None:
        self._pieces = pieces
        length = str(sum(map(len, pieces)))
        super().__init__(None, media_type=media_type, headers={"Content-Length": length})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for piece in self._pieces:
            for start in range(0, len(piece), _SENT_AT_ONCE):
                part = memoryview(piece)[start : start + _SENT_AT_ONCE]
                await send({"type": "http.response.body", "body": bytes(part), "more_body": True})
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
