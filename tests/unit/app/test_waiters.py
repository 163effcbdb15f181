"""A waiting poll is woken by a notice, and by the stores themselves when the notice was lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest
from fakeredis import FakeServer
from fakeredis.aioredis import FakeRedis
from redis.exceptions import ConnectionError as RedisConnectionError

from app.futures import waiters as module
from app.futures.waiters import DONE_CHANNEL, Listener, Waiters
from app.sampling.keys import feed_key


class Store:
    """What is finished, as the database and Redis would say; asked, it counts."""

    def __init__(self) -> None:
        self.finished: set[str] = set()
        self.asked = 0
        self.broken = False

    async def find(self, request_ids: Sequence[str]) -> set[str]:
        self.asked += 1
        if self.broken:
            raise RedisConnectionError("away")
        return self.finished & set(request_ids)


def run(test: Callable[[Waiters, FakeRedis, Store], Awaitable[None]], server: FakeServer | None = None) -> None:
    async def body() -> None:
        redis, store = FakeRedis(server=server or FakeServer()), Store()
        waiters = Waiters(redis, store.find)
        waiters.start()
        async with asyncio.timeout(10):
            await test(waiters, redis, store)
        await waiters.stop()

    asyncio.run(body())


async def subscribed(redis: FakeRedis) -> None:
    while not (await redis.pubsub_numsub(DONE_CHANNEL))[0][1]:
        await asyncio.sleep(0)


@pytest.fixture
def no_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP_S", 3600.0)


@pytest.fixture
def fast_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SWEEP_S", 0.01)


def test_a_notice_wakes_every_poll_of_its_futures(no_sweep: None) -> None:
    async def test(waiters: Waiters, redis: FakeRedis, store: Store) -> None:
        await subscribed(redis)
        with waiters.waiting_for("a") as a1, waiters.waiting_for("a") as a2, waiters.waiting_for("b") as b:
            await redis.publish(DONE_CHANNEL, "a\nb")
            await asyncio.gather(a1.wait(), a2.wait(), b.wait())

    run(test)


def test_a_notice_wakes_no_other_poll(no_sweep: None) -> None:
    async def test(waiters: Waiters, redis: FakeRedis, store: Store) -> None:
        await subscribed(redis)
        with waiters.waiting_for("a") as a, waiters.waiting_for("ab") as other:
            await redis.publish(DONE_CHANNEL, "a")
            await a.wait()
            assert not other.is_set()

    run(test)


def test_a_lost_notice_is_made_good_by_the_next_sweep(fast_sweep: None) -> None:
    async def test(waiters: Waiters, redis: FakeRedis, store: Store) -> None:
        with waiters.waiting_for("a") as a, waiters.waiting_for("b") as b:
            store.finished = {"a"}
            await a.wait()
            assert not b.is_set()

    run(test)


def test_a_new_subscription_looks_for_what_was_missed(no_sweep: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        redis, store = FakeRedis(server=FakeServer()), Store()
        store.finished = {"a"}
        waiters = Waiters(redis, store.find)
        with waiters.waiting_for("a") as a:
            waiters.start()
            async with asyncio.timeout(10):
                await a.wait()
        await waiters.stop()

    asyncio.run(body())


def test_sweeps_go_on_after_an_outage_of_a_store(fast_sweep: None) -> None:
    async def test(waiters: Waiters, redis: FakeRedis, store: Store) -> None:
        store.broken = True
        with waiters.waiting_for("a") as a:
            while store.asked < 3:
                await asyncio.sleep(0)
            store.broken, store.finished = False, {"a"}
            await a.wait()

    run(test)


def test_polls_are_answered_by_the_store_while_redis_is_away(fast_sweep: None) -> None:
    server = FakeServer()
    server.connected = False

    async def test(waiters: Waiters, redis: FakeRedis, store: Store) -> None:
        with waiters.waiting_for("a") as a:
            store.finished = {"a"}
            await a.wait()

    run(test, server)


def test_nobody_waiting_costs_no_query(fast_sweep: None) -> None:
    async def test(waiters: Waiters, redis: FakeRedis, store: Store) -> None:
        await subscribed(redis)
        for _ in range(5):
            await asyncio.sleep(module.SWEEP_S)
        assert store.asked == 0

    run(test)


def test_a_future_that_finishes_between_the_check_and_the_wait_is_noticed(no_sweep: None) -> None:
    async def test(waiters: Waiters, redis: FakeRedis, store: Store) -> None:
        await subscribed(redis)
        with waiters.waiting_for("a") as a:  # registered first; then comes the check, which says "pending"
            await redis.publish(DONE_CHANNEL, "a")
            await a.wait()

    run(test)


def test_stopping_wakes_everybody(no_sweep: None) -> None:
    async def test(waiters: Waiters, redis: FakeRedis, store: Store) -> None:
        with waiters.waiting_for("a") as a:
            await waiters.stop()
            assert a.is_set()
            assert waiters.stopping

    run(test)


def test_nothing_is_left_of_polls_that_have_gone(no_sweep: None) -> None:
    async def test(waiters: Waiters, redis: FakeRedis, store: Store) -> None:
        for _ in range(3):
            with waiters.waiting_for("a"), waiters.waiting_for("a"):
                pass
        assert waiters._waiting == {}

    run(test)


def test_a_future_is_expected_by_its_owner_until_its_notice_comes(no_sweep: None) -> None:
    async def test(waiters: Waiters, redis: FakeRedis, store: Store) -> None:
        await subscribed(redis)
        waiters.expect("a", "alice")
        assert waiters.is_expected("a", "alice")
        assert not waiters.is_expected("a", "bob")
        with waiters.waiting_for("a") as a:
            await redis.publish(DONE_CHANNEL, "a")
            await a.wait()
        assert not waiters.is_expected("a", "alice")

    run(test)


def test_a_notice_that_overtakes_the_answer_of_its_submit_is_not_forgotten(no_sweep: None) -> None:
    async def test(waiters: Waiters, redis: FakeRedis, store: Store) -> None:
        await subscribed(redis)
        with waiters.waiting_for("a") as a:
            await redis.publish(DONE_CHANNEL, "a")
            await a.wait()
        waiters.expect("a", "alice")
        assert not waiters.is_expected("a", "alice")

    run(test)


def test_nothing_is_expected_of_a_new_subscription(no_sweep: None) -> None:
    async def body() -> None:
        redis, store = FakeRedis(server=FakeServer()), Store()
        waiters = Waiters(redis, store.find)
        waiters.expect("a", "alice")
        waiters.start()
        async with asyncio.timeout(10):
            await subscribed(redis)
            while waiters.is_expected("a", "alice"):
                await asyncio.sleep(0)
        await waiters.stop()

    asyncio.run(body())


def test_a_notice_wakes_whoever_waits_for_the_feed_of_its_client(no_sweep: None) -> None:
    async def test(waiters: Waiters, redis: FakeRedis, store: Store) -> None:
        await subscribed(redis)
        with (
            waiters.waiting_for(feed_key("s:sample:0", 2)) as feed,
            waiters.waiting_for(feed_key("s:sample:0", 0)) as another,
        ):
            await redis.publish(DONE_CHANNEL, "s:sample:0:2000000007")
            await feed.wait()
            assert not another.is_set()

    run(test)


def test_a_listener_hears_his_channel_and_recovers_after_every_subscription(no_sweep: None) -> None:
    async def body() -> None:
        heard: list[str] = []
        recovered: list[int] = []

        async def recover() -> None:
            recovered.append(len(recovered))
            if len(recovered) < 3:
                raise RedisConnectionError("away again")

        redis = FakeRedis(server=FakeServer())
        waiters = Waiters(redis, Store().find, [Listener("news", heard.extend, recover)])
        waiters.start()
        async with asyncio.timeout(10):
            while len(recovered) < 3 or not (await redis.pubsub_numsub("news"))[0][1]:
                await asyncio.sleep(0.01)
            await redis.publish("news", "a\nb")
            while heard != ["a", "b"]:
                await asyncio.sleep(0)
        await waiters.stop()

    asyncio.run(body())


class DeafRedis(FakeRedis):
    """Takes a cancellation for a broken connection, as a client may that is just connecting."""

    cancelled = 0

    @contextlib.asynccontextmanager
    async def pubsub(self) -> AsyncIterator[None]:  # type: ignore[override]
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            self.cancelled += 1
            if self.cancelled == 1:
                raise RedisConnectionError("lost") from None
            raise
        yield


def test_stopping_ends_even_when_a_cancellation_is_lost(no_sweep: None) -> None:
    async def body() -> None:
        redis = DeafRedis(server=FakeServer())
        waiters = Waiters(redis, Store().find)
        waiters.start()
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await waiters.stop()
        assert redis.cancelled > 0

    asyncio.run(body())
