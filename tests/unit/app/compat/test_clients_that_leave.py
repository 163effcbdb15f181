"""Work for a client that has left ends, also if it misses its cancellation."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.compat import connection
from app.compat.connection import ClientGone, while_connected


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


def test_the_answer_is_given_to_a_client_that_stays() -> None:
    async def work() -> str:
        return "done"

    assert asyncio.run(while_connected(never, work())) == "done"
