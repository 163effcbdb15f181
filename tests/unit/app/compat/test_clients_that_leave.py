"""Work for a client that has left ends, also if it misses its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from app.compat import connection
from app.compat.connection import ClientGone, while_connected
from app.compat.service import CompatService


async def gone() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


def test_work_that_loses_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CANCEL_AGAIN_S", 0.01)
    lost = []

    async def work() -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost.append(1)
                if len(lost) == 3:
                    raise

    with pytest.raises(ClientGone):
        asyncio.run(asyncio.wait_for(while_connected(gone, work()), 5))
    assert len(lost) == 3


class Forgetful:
    """Direct sampling whose followers miss their first cancellation."""

    def __init__(self) -> None:
        self.missed = 0
        self.closed: list[object] = []

    async def follow(self, sample: object) -> AsyncGenerator[Any, None]:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.missed += 1
                if self.missed == 2:
                    raise
        yield

    async def close(self, sample: object) -> None:
        self.closed.append(sample)


def test_a_stream_whose_relay_loses_a_cancellation_gives_its_sample_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_CANCEL_AGAIN_S", 0.01)
    direct = Forgetful()
    asked: Any = SimpleNamespace(body=SimpleNamespace(n=0, include_usage=False), shapes=[None])

    async def emit(event: object) -> None:
        raise AssertionError(event)

    service = CompatService(direct, None)  # type: ignore[arg-type]
    stream = service.stream(asked, ["sample"], emit)  # type: ignore[list-item]

    async def gone_later() -> dict[str, Any]:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGone):
        asyncio.run(asyncio.wait_for(while_connected(gone_later, stream), 5))
    assert direct.missed == 2 and direct.closed == ["sample"]


def test_the_answer_is_given_to_a_client_that_stays() -> None:
    async def work() -> str:
        return "done"

    assert asyncio.run(while_connected(never, work())) == "done"
