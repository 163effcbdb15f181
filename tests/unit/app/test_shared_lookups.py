"""Who asks the same as others, at the same time or a moment later, costs no look-up of his own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.shared_lookups import SharedLookups


class Source:
    """Answers once it is let; asked, it counts."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.error: Exception | None = None

    async def look(self) -> int:
        self.asked += 1
        number = self.asked
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        return number


def run(test: Callable[[Source], Awaitable[None]]) -> None:
    async def body() -> None:
        await test(Source())

    asyncio.run(body())


def test_those_who_wait_together_share_an_answer() -> None:
    async def test(source: Source) -> None:
        shared: SharedLookups[int] = SharedLookups()
        asking = [asyncio.create_task(shared.get("a", source.look)) for _ in range(5)]
        other = asyncio.create_task(shared.get("b", source.look))
        await asyncio.sleep(0)
        source.may_answer.set()
        assert set(await asyncio.gather(*asking)) == {1}
        assert await other == 2

    run(test)


@pytest.mark.parametrize(("ttl_s", "answers"), [(0.0, [1, 2]), (60.0, [1, 1])])
def test_an_answer_is_believed_for_its_time(ttl_s: float, answers: list[int]) -> None:
    async def test(source: Source) -> None:
        source.may_answer.set()
        shared: SharedLookups[int] = SharedLookups(ttl_s=ttl_s)
        assert [await shared.get("a", source.look) for _ in range(2)] == answers

    run(test)


def test_an_error_goes_to_all_who_wait_and_is_not_kept() -> None:
    async def test(source: Source) -> None:
        shared: SharedLookups[int] = SharedLookups(ttl_s=60)
        source.error = ValueError("no")
        asking = [asyncio.create_task(shared.get("a", source.look)) for _ in range(2)]
        await asyncio.sleep(0)
        source.may_answer.set()
        assert [str(error) for error in await asyncio.gather(*asking, return_exceptions=True)] == ["no", "no"]
        source.error = None
        assert await shared.get("a", source.look) == 2

    run(test)


def test_who_gives_up_takes_nobody_along() -> None:
    async def test(source: Source) -> None:
        shared: SharedLookups[int] = SharedLookups()
        first, second = (asyncio.create_task(shared.get("a", source.look)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        source.may_answer.set()
        assert await second == 1
        assert first.cancelled()

    run(test)


def test_answers_do_not_pile_up() -> None:
    async def test(source: Source) -> None:
        source.may_answer.set()
        shared: SharedLookups[int] = SharedLookups(ttl_s=0.005)
        for key in range(10):
            await shared.get(key, source.look)
            await asyncio.sleep(0.01)
        assert len(shared._answers) == 1
        assert not shared._running

    run(test)
