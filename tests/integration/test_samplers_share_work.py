"""Samplers with more to do than they can run: whose turn it is, who takes over, and what happens when one leaves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis
import redis.asyncio

from app.sampling.endings import forget_samples
from app.sampling.keys import cancel_channel, claim_key, claims_key, result_key, samplers_key
from app.sampling.store import Depths, SampleAnswer, SampleInbox
from app.settings import Settings
from app.wire import sampling
from app.wire.sampling import StoredSample, encode_stored
from app.wire.types import SampledSequence, SampleRequest, SampleResult, SamplingParams
from tests.factories import POOL
from tests.integration.held_engine import HeldEngine, base_model_only
from tests.services import wait_for
from workers.sample import service
from workers.sample.service import SampleService

ROWS = 8
MOST_IN_ENGINE = ROWS + ROWS // 4
RESULT = SampleResult([SampledSequence("length", np.array([1]), np.array([0.0]), None)])


class Sampler:
    """A sampler whose engine ends a job when the test says so."""

    def __init__(self, server: redis.Redis, worker_id: str) -> None:
        self.worker_id = worker_id
        self.engine = HeldEngine()
        idle = {"start": lambda: None, "stop": lambda timeout_s: None}
        stubs: dict[str, Any] = {
            "usage": SimpleNamespace(**idle, counted=lambda stored, deliver: deliver),
            "recorder": SimpleNamespace(**idle),
            "adapters": base_model_only(self.engine),
        }
        settings = Settings(max_running_sequences=ROWS, sample_claim_s=5.0)
        self.service = SampleService(
            worker_id=worker_id, pool=POOL, engine=self.engine, redis=server, settings=settings, **stubs
        )
        self.service.start()

    def take(self, request_ids: list[str]) -> None:
        self.service.take(request_ids)

    @property
    def running(self) -> set[str]:
        return set(self.engine.jobs)

    def end(self, request_id: str) -> None:
        self.engine.end(request_id, RESULT)
        self.service._bell.set()


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def start(server: redis.Redis) -> Iterator[Callable[[str], Sampler]]:
    """Starts samplers."""
    with ExitStack() as stack:

        def start_one(worker_id: str) -> Sampler:
            sampler = Sampler(server, worker_id)
            stack.callback(sampler.service.stop, 5)
            return sampler

        yield start_one


@pytest.fixture
def submit(redis_url: str) -> Callable[..., list[str]]:
    """Stores requests of an owner; nobody is rung."""

    def store(owner: str, count: int) -> list[str]:
        ids = [f"{owner}:sample:0:{number}" for number in range(count)]

        async def run() -> None:
            async with redis.asyncio.Redis.from_url(redis_url) as client:
                inbox = SampleInbox(client, depths=Depths(10_000, 10_000))
                for request_id in ids:
                    request = SampleRequest(request_id, [1, 2], SamplingParams(max_tokens=4))
                    body = encode_stored(StoredSample(owner, owner, POOL, None, request))
                    await inbox.submit(request_id, POOL, body, owner_id=owner)

        asyncio.run(run())
        return ids

    return store


Start = Callable[[str], Sampler]
Submit = Callable[..., list[str]]


def claimed_by(server: redis.Redis, request_ids: list[str]) -> list[str]:
    return [(raw or b"").decode() for raw in server.mget([claim_key(name) for name in request_ids])]  # type: ignore[union-attr]


@contextmanager
def stopping(stop: Callable[[], None]) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    yield thread
    thread.join(10)
    assert not thread.is_alive()


def test_a_tenants_one_request_runs_before_all_but_a_few_of_another_tenants_thousands(
    start: Start, submit: Submit, server: redis.Redis
) -> None:
    sampler = start("w1")
    flood = submit("a", 2000)
    sampler.take(flood)
    wait_for(lambda: len(sampler.running) == MOST_IN_ENGINE and claimed_by(server, flood[-1:]) == ["w1"])
    (mine,) = submit("b", 1)
    sampler.take([mine])
    for request_id in flood[:3]:
        sampler.end(request_id)
    wait_for(lambda: sampler.running.isdisjoint(flood[:3]) and len(sampler.running) == MOST_IN_ENGINE)
    assert mine in sampler.running


def test_what_only_waits_has_no_part_in_its_samplers_death(start: Start, submit: Submit, server: redis.Redis) -> None:
    sampler = start("w1")
    ids = submit("a", 40)
    sampler.take(ids)

    def counted() -> list[int]:
        return [int(raw or -1) for raw in server.mget([claims_key(name) for name in ids])]  # type: ignore[union-attr]

    wait_for(lambda: counted() == [1] * MOST_IN_ENGINE + [0] * (40 - MOST_IN_ENGINE))
    sampler.end(ids[0])
    wait_for(lambda: counted() == [-1] + [1] * MOST_IN_ENGINE + [0] * (39 - MOST_IN_ENGINE))


def test_a_cancelled_request_that_waits_never_runs(
    start: Start, submit: Submit, server: redis.Redis, redis_url: str
) -> None:
    sampler = start("w1")
    ids = submit("a", MOST_IN_ENGINE + 2)
    sampler.take(ids)
    wait_for(lambda: claimed_by(server, ids[-1:]) == ["w1"] and server.pubsub_numsub(cancel_channel(POOL))[0][1])

    async def cancel() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            inbox = SampleInbox(client, depths=Depths(10_000, 10_000))
            await inbox.cancel(ids[-2], POOL, SampleAnswer.failed("cancelled", "user"))

    asyncio.run(cancel())
    wait_for(lambda: ids[-2] not in sampler.service._running)
    for request_id in ids[:2]:
        sampler.end(request_id)
    wait_for(lambda: ids[-1] in sampler.running)
    assert ids[-2] not in sampler.running


def test_samples_of_a_session_that_has_ended_leave_the_engine(
    start: Start, submit: Submit, server: redis.Redis
) -> None:
    sampler = start("w1")
    ids = submit("a", MOST_IN_ENGINE + 2)
    sampler.take(ids)
    wait_for(lambda: claimed_by(server, ids) == ["w1"] * len(ids) and server.pubsub_numsub(cancel_channel(POOL))[0][1])
    assert forget_samples(server, POOL, ids) == len(ids)
    wait_for(lambda: not sampler.running and not sampler.service._running)
    assert not server.exists(*map(result_key, ids))


def test_requests_that_their_home_does_not_claim_are_taken_by_another(start: Start, submit: Submit) -> None:
    """Their home has died, and nobody hears its doorbell."""
    sampler = start("w1")
    began = time.monotonic()
    ids = submit("a", 4)
    wait_for(lambda: sampler.running == set(ids), timeout_s=5)
    assert time.monotonic() - began >= 0.9


def test_a_busy_sampler_takes_them_too_since_they_may_be_another_tenants(start: Start, submit: Submit) -> None:
    sampler = start("w1")
    sampler.take(submit("a", 200))
    wait_for(lambda: len(sampler.running) == MOST_IN_ENGINE)
    (mine,) = submit("b", 1)
    wait_for(lambda: mine in sampler.service._running, timeout_s=5)


def test_an_idle_newcomer_gets_part_of_what_waits_at_another(
    start: Start, submit: Submit, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_SHARE_EVERY_S", 0.2)
    first = start("w1")
    ids = submit("a", 100)
    first.take(ids)
    wait_for(lambda: claimed_by(server, ids) == ["w1"] * 100)
    second = start("w2")
    wait_for(lambda: len(second.running) >= ROWS // 2, timeout_s=10)
    assert first.running.isdisjoint(second.running)
    assert claimed_by(server, ids[:MOST_IN_ENGINE]) == ["w1"] * MOST_IN_ENGINE


def test_a_sampler_that_is_told_to_stop_finishes_what_it_has_begun_and_hands_over_what_waits(
    start: Start, submit: Submit, server: redis.Redis
) -> None:
    leaving = start("w1")
    ids = submit("a", MOST_IN_ENGINE + 3)
    leaving.take(ids)
    wait_for(lambda: claimed_by(server, ids) == ["w1"] * len(ids) and server.hexists(samplers_key(POOL), "w1"))
    with stopping(lambda: leaving.service.stop(5, drain_s=60)) as thread:
        wait_for(lambda: claimed_by(server, ids[MOST_IN_ENGINE:]) == [""] * 3)
        wait_for(lambda: not server.hexists(samplers_key(POOL), "w1"))
        other = start("w2")
        wait_for(lambda: other.running == set(ids[MOST_IN_ENGINE:]), timeout_s=5)
        leaving.take(submit("b", 1))
        for request_id in ids[:MOST_IN_ENGINE]:
            assert thread.is_alive()
            leaving.end(request_id)
    assert server.exists(*map(result_key, ids)) == MOST_IN_ENGINE
    assert not server.exists(*(claim_key(request_id) for request_id in ids[:MOST_IN_ENGINE]))


@pytest.mark.parametrize("how", ["time is over", "hurried"])
def test_what_it_cannot_finish_is_anothers_at_once(start: Start, submit: Submit, server: redis.Redis, how: str) -> None:
    leaving = start("w1")
    ids = submit("a", 2)
    leaving.take(ids)
    wait_for(lambda: leaving.running == set(ids))
    with stopping(lambda: leaving.service.stop(5, drain_s=0.1 if how == "time is over" else 60)):
        if how == "hurried":
            leaving.service.hurry()
    assert claimed_by(server, ids) == ["", ""]
    other = start("w2")
    wait_for(lambda: other.running == set(ids), timeout_s=0.9)
    counts = server.mget([claims_key(request_id) for request_id in ids])
    assert counts == [b"1", b"1"]


def test_a_sampler_that_was_drained_takes_requests_again(start: Start, submit: Submit, server: redis.Redis) -> None:
    sampler = start("w1")
    wait_for(lambda: server.hexists(samplers_key(POOL), "w1"))
    sampler.service.retire()
    wait_for(lambda: not server.hexists(samplers_key(POOL), "w1") and not sampler.service._drained.empty())
    ids = submit("a", 1)
    sampler.take(ids)
    wait_for(lambda: not sampler.service._inbox)
    assert claimed_by(server, ids) == [""] and not sampler.service.is_busy

    sampler.service.resume()
    wait_for(lambda: sampler.running == set(ids) and server.hexists(samplers_key(POOL), "w1"), timeout_s=5)
    assert sampler.service.is_busy
    with stopping(lambda: sampler.service.stop(5, drain_s=60)) as thread:
        wait_for(lambda: not server.hexists(samplers_key(POOL), "w1"))
        assert thread.is_alive()
        sampler.end(ids[0])
    assert server.exists(result_key(ids[0]))


def test_a_request_of_a_newer_release_is_left_to_its_samplers(
    server: redis.Redis, start: Start, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During an upgrade both serve; the older one neither fails it nor counts as one that died of it."""
    old = start("old")
    known = submit("bob", 1)
    with monkeypatch.context() as newer_web:
        newer_web.setattr(sampling, "SAMPLE_FORMAT", sampling.SAMPLE_FORMAT + 1)
        ids = submit("alice", 2)
    old.take(ids + known)
    wait_for(lambda: old.running == set(known) and old.service._left.keys() == set(ids))
    wait_for(lambda: claimed_by(server, ids) == ["", ""])
    assert [int(raw or 0) for raw in server.mget([claims_key(name) for name in ids])] == [0, 0]  # type: ignore[union-attr]
    assert not server.exists(*[result_key(name) for name in ids])
    monkeypatch.setattr(sampling, "SAMPLE_FORMAT", sampling.SAMPLE_FORMAT + 1)
    new = start("new")
    wait_for(lambda: new.running == set(ids))
    assert old.running == set(known)
