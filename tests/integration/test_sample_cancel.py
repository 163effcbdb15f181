"""A cancelled sample ends at once, for whoever polls it and for the engine that works on it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis

from app.sampling.keys import cancel_channel, unfinished_key
from app.sampling.store import SampleAnswer, SampleDesk
from app.settings import Settings
from app.wire.types import SampledSequence, SampleResult
from tests.factories import POOL
from tests.integration.conftest import Api
from tests.integration.held_engine import HeldEngine, base_model_only
from tests.services import wait_for
from workers.sample.service import SampleService


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def engine(server: redis.Redis) -> Iterator[HeldEngine]:
    """The engine of a sampler that takes what waits."""
    held = HeldEngine()
    usage = SimpleNamespace(start=lambda: None, stop=lambda timeout_s: None, counted=lambda stored, deliver: deliver)
    stubs: dict[str, Any] = {"usage": usage, "adapters": base_model_only(held)}
    stubs["recorder"] = SimpleNamespace(start=lambda: None, stop=lambda timeout_s: None)
    settings = Settings(sample_claim_s=0.3)
    sampler = SampleService(worker_id="w1", pool=POOL, engine=held, redis=server, settings=settings, **stubs)
    held.take = sampler.take  # type: ignore[attr-defined]
    sampler.start()
    yield held
    sampler.stop(5)


@pytest.fixture
def request_id(api: Api) -> str:
    body = {"session_id": api.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = api.ok("create_sampling_session", body)["sampling_session_id"]
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
    return str(api.ok("asample", body)["request_id"])


def cancel(api: Api, request_id: str, who: str = "alice") -> int:
    return api.post("cancel_future", {"request_id": request_id}, who=who).status_code


def taken(engine: HeldEngine, request_id: str) -> None:
    engine.take([request_id])  # type: ignore[attr-defined]
    wait_for(lambda: request_id in engine.jobs)


CANCELLED = {"error": "the sample was cancelled by its client", "category": "user"}


def test_a_cancelled_sample_that_nobody_has_taken_never_runs(api: Api, request_id: str, server: redis.Redis) -> None:
    assert cancel(api, request_id) == 204
    assert api.poll(request_id).json() == CANCELLED
    assert server.zcard(unfinished_key(POOL)) == 0
    assert SampleDesk(server, pool=POOL, worker_id="w", claim_s=60, result_ttl_s=900).claim([request_id]) == []


def test_a_cancelled_sample_leaves_the_engine(
    api: Api, request_id: str, engine: HeldEngine, server: redis.Redis
) -> None:
    taken(engine, request_id)
    wait_for(lambda: server.pubsub_numsub(cancel_channel(POOL))[0][1])
    assert cancel(api, request_id) == 204
    wait_for(lambda: not engine.jobs)
    assert api.poll(request_id).json() == CANCELLED


def test_a_cancellation_whose_notice_was_lost_shows_when_the_claim_is_renewed(
    api: Api, request_id: str, engine: HeldEngine
) -> None:
    taken(engine, request_id)
    engine.deaf = True
    assert cancel(api, request_id) == 204
    engine.deaf = False
    wait_for(lambda: not engine.jobs)


def test_a_result_that_comes_too_late_changes_nothing(api: Api, request_id: str, engine: HeldEngine) -> None:
    taken(engine, request_id)
    engine.deaf = True
    assert cancel(api, request_id) == 204
    engine.end(request_id, SampleResult([SampledSequence("length", np.array([1]), np.array([0.0]), None)]))
    wait_for(lambda: not engine.jobs)
    assert api.poll(request_id).json() == CANCELLED


def test_a_finished_sample_stays_as_it_is(api: Api, request_id: str, server: redis.Redis) -> None:
    desk = SampleDesk(server, pool=POOL, worker_id="w", claim_s=60, result_ttl_s=900)
    desk.finish([(request_id, SampleAnswer("proto", b"result"))])
    assert [cancel(api, request_id) for _ in range(2)] == [204, 204]
    assert api.poll(request_id).content == b"result"


def test_what_cannot_be_cancelled(api: Api, request_id: str) -> None:
    assert cancel(api, request_id, who="bob") == 404
    assert cancel(api, "s:sample:0:0") == 404
    assert cancel(api, f"{api.run()}:0") == 400
    assert cancel(api, f"{request_id}99") == 204  # never sent, or lost: nothing to stop
    assert api.poll(request_id).status_code == 408


def test_clients_are_told_that_they_may_cancel(api: Api) -> None:
    assert api.ok("client/dynamic_config", {})["sample_cancel_enabled"] is True
