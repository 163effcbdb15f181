"""Where samples are sent: each prompt's to its home among the live samplers, by a view that costs requests nothing."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

import pytest
import redis
import redis.asyncio

from app.sampling import presence
from app.sampling.keys import samplers_key
from app.sampling.presence import SamplerPresence, Samplers
from app.sampling.router import SampleRouter
from app.sampling.routing import LOAD_SLACK
from app.up.network import free_port
from tests.factories import POOL
from tests.integration.conftest import Api
from tests.services import wait_for

T = TypeVar("T")
WORKERS = [f"w{number}" for number in range(4)]


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def announce(server: redis.Redis, *workers: str, load: int = 0) -> None:
    for worker_id in workers:
        SamplerPresence(server, pool=POOL, worker_id=worker_id).announce(load)


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def routed(url: str, script: Callable[[SampleRouter, Clock], Awaitable[T]], *, prefix_tokens: int = 256) -> T:
    async def run() -> T:
        async with redis.asyncio.Redis.from_url(url) as client:
            clock = Clock()
            return await script(SampleRouter(client, prefix_tokens=prefix_tokens, clock=clock), clock)

    return asyncio.run(run())


async def homes(router: SampleRouter, *prompts: list[int], sequences: int = 1) -> list[str | None]:
    return [await router.home(POOL, None, prompt, sequences) for prompt in prompts]


def scripts_run(server: redis.Redis) -> int:
    calls = server.info("commandstats")  # type: ignore[union-attr]
    return int(calls.get("cmdstat_evalsha", {"calls": 0})["calls"])  # type: ignore[union-attr]


def loads(url: str) -> dict[str, int]:
    async def look() -> dict[str, int]:
        async with redis.asyncio.Redis.from_url(url) as client:
            return await Samplers(client).loads(POOL)

    return asyncio.run(look())


def test_samplers_live_until_they_leave(server: redis.Redis, redis_url: str) -> None:
    announce(server, "w0", load=7)
    announce(server, "w1")
    assert loads(redis_url) == {"w0": 7, "w1": 0}
    SamplerPresence(server, pool=POOL, worker_id="w0").leave()
    assert loads(redis_url) == {"w1": 0}


def test_samplers_that_have_fallen_silent_are_dead(
    server: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce(server, *WORKERS)
    monkeypatch.setattr(presence, "SILENCE_S", 0.05)
    wait_for(lambda: loads(redis_url) == {})
    assert not server.exists(samplers_key(POOL))


def test_a_group_of_one_prompt_goes_to_one_sampler_and_other_prompts_to_others(
    server: redis.Redis, redis_url: str
) -> None:
    announce(server, *WORKERS)

    async def script(router: SampleRouter, clock: Clock) -> list[list[str | None]]:
        return [await homes(router, *[[prompt, 1, 2]] * 16) for prompt in range(12)]

    groups = routed(redis_url, script)
    assert all(len(set(group)) == 1 for group in groups)
    assert len({group[0] for group in groups}) > 1


def test_every_process_sends_a_prompt_to_the_same_sampler(server: redis.Redis, redis_url: str) -> None:
    announce(server, *WORKERS)
    once, again = (routed(redis_url, lambda router, clock: homes(router, *([n] for n in range(50)))) for _ in range(2))
    assert once == again


@pytest.mark.parametrize("workers", [[], ["w0"]])
def test_without_a_choice_samples_go_to_the_pool_and_cost_nothing(
    server: redis.Redis, redis_url: str, workers: list[str]
) -> None:
    announce(server, *workers)

    async def script(router: SampleRouter, clock: Clock) -> list[str | None]:
        first = await homes(router, [1])
        before = scripts_run(server)
        others = await homes(router, *([n] for n in range(500)))
        assert scripts_run(server) == before
        return first + others

    assert set(routed(redis_url, script)) == {None}


def test_a_choice_costs_no_look_at_redis_either(server: redis.Redis, redis_url: str) -> None:
    announce(server, *WORKERS)

    async def script(router: SampleRouter, clock: Clock) -> None:
        await homes(router, [1])
        before = scripts_run(server)
        await homes(router, *([n] for n in range(500)))
        assert scripts_run(server) == before

    routed(redis_url, script)


def test_routing_can_be_turned_off(server: redis.Redis, redis_url: str) -> None:
    announce(server, *WORKERS)
    assert routed(redis_url, lambda router, clock: homes(router, [1]), prefix_tokens=0) == [None]


def test_while_redis_is_away_samples_go_to_the_pool() -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    assert routed(url, lambda router, clock: homes(router, [1], [2])) == [None, None]


def test_a_sampler_that_has_left_gets_nothing_after_a_second(server: redis.Redis, redis_url: str) -> None:
    """Looking is done beside the requests: the first after a second still goes by the old view."""
    announce(server, "w0", "w1", "w2")

    async def script(router: SampleRouter, clock: Clock) -> None:
        first = (await homes(router, [5]))[0]
        assert first is not None
        SamplerPresence(server, pool=POOL, worker_id=first).leave()
        clock.now += 1.1
        assert await homes(router, [5]) == [first]
        async with asyncio.timeout(10):
            while await homes(router, [5]) == [first]:
                await asyncio.sleep(0.001)
        clock.now += 60
        SamplerPresence(server, pool=POOL, worker_id=first).announce(0)
        assert await homes(router, [5]) == [first]  # after a pause it looks first

    routed(redis_url, script)


def test_what_a_process_has_sent_counts_as_load_at_once(server: redis.Redis, redis_url: str) -> None:
    """Hundreds of samples with one beginning, like a system prompt, do not all meet at its home."""
    announce(server, *WORKERS)

    async def script(router: SampleRouter, clock: Clock) -> Counter[str | None]:
        return Counter(await homes(router, *[[1, 2, 3]] * 800))

    counts = routed(redis_url, script)
    assert len(counts) == 3
    assert max(counts.values()) <= 1.25 * 800 / len(WORKERS) + LOAD_SLACK


def test_samplers_that_say_that_they_have_much_to_do_are_passed_over(server: redis.Redis, redis_url: str) -> None:
    announce(server, *WORKERS)
    prompts = [[n] for n in range(200)]
    busy = routed(redis_url, lambda router, clock: homes(router, [0]))[0]
    assert busy is not None
    announce(server, busy, load=10_000)
    assert busy not in routed(redis_url, lambda router, clock: homes(router, *prompts))


def test_samples_ring_at_their_home_and_without_a_choice_at_their_pool(api: Api, server: redis.Redis) -> None:
    sampler = {"session_id": api.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
    identity = api.ok("create_sampling_session", sampler)["sampling_session_id"]

    def sample(number: int, prompt: int) -> None:
        body = {"sampling_session_id": identity, "seq_id": number, "prompt": {"chunks": [{"tokens": [prompt]}]}}
        api.ok("asample", body)

    sample(0, 1)
    wait_for(lambda: server.llen(f"sample.{POOL}") == 1)
    announce(server, *WORKERS)
    router = api.client.app.state.services.sampling._router  # type: ignore[attr-defined]
    router._views.clear()
    for number in range(1, 17):
        sample(number, 1)
    lengths: dict[str, int] = {}

    def all_rung() -> bool:
        lengths.update({worker: server.llen(f"wake.{worker}") for worker in WORKERS})  # type: ignore[misc]
        return sum(lengths.values()) == 16

    wait_for(all_rung)
    assert sorted(lengths.values()) == [0, 0, 0, 16]
    assert server.llen(f"sample.{POOL}") == 1
