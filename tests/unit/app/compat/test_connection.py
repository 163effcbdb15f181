"""Work for a client ends when the client leaves, and streams say what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from app.compat import connection
from app.compat.connection import ClientGone, Emit, EventStream, while_connected

Message = dict[str, Any]


async def stays() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def leaves() -> Message:
    return {"type": "http.disconnect"}


def written(produce: Callable[[Emit], Any], receive: Any = stays) -> list[Message]:
    """The messages of a stream."""
    sent: list[Message] = []

    async def send(message: Any) -> None:
        sent.append(message)

    stream = EventStream(produce, lambda error: {"error": str(error)})
    asyncio.run(stream({"type": "http"}, receive, send))
    return sent


def test_work_is_cancelled_when_the_client_leaves() -> None:
    cancelled = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(ClientGone):
        asyncio.run(while_connected(leaves, work()))
    assert cancelled


def test_work_that_fails_tells_its_own_error() -> None:
    async def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(while_connected(stays, work()))


def test_a_stream_ends_with_done() -> None:
    async def produce(emit: Emit) -> None:
        await emit({"a": "é"})

    start, first, done = written(produce)
    headers = dict(start["headers"])
    assert headers[b"content-type"].startswith(b"text/event-stream") and b"content-length" not in headers
    assert first["body"] == 'data: {"a":"é"}\n\n'.encode() and first["more_body"]
    assert done == {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}


def test_a_stream_that_fails_says_so_before_it_ends() -> None:
    async def produce(emit: Emit) -> None:
        raise ValueError("broken")

    _, told, done = written(produce)
    assert told["body"] == b'data: {"error":"broken"}\n\n' and done["body"] == b"data: [DONE]\n\n"


def test_a_silent_stream_shows_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SILENCE_S", 0.0)
    said = []

    async def produce(emit: Emit) -> None:
        while len(said) < 2:
            await asyncio.sleep(0)

    sent: list[Message] = []

    async def send(message: Any) -> None:
        sent.append(message)
        said.extend([True] if message.get("body", b"").startswith(b":") else [])

    asyncio.run(EventStream(produce, str)({"type": "http"}, stays, send))
    assert len(said) >= 2


def test_nothing_is_sent_to_a_client_that_has_left() -> None:
    async def produce(emit: Emit) -> None:
        await asyncio.Event().wait()

    assert [message["type"] for message in written(produce, leaves)] == ["http.response.start"]
