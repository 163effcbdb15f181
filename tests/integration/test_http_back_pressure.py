"""Too many samples: who is asked to slow down, who is not, and what those hear that wait already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from sqlalchemy import delete, update

from app.db import utc_now
from app.fleet.models import Worker
from app.sampling.store import SampleAnswer, SampleDesk
from app.sessions.models import ClientSession
from tests.factories import POOL
from tests.integration.conftest import Api, running

Settings = Callable[..., None]


class Tenant:
    """One tenant's sampling client."""

    def __init__(self, api: Api, who: str) -> None:
        self.api = api
        self.who = who
        self.session_id = api.session(who)
        body = {"session_id": self.session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
        self.sampler = api.ok("create_sampling_session", body, who=who)["sampling_session_id"]

    def submit(self, number: int) -> httpx.Response:
        body = {"sampling_session_id": self.sampler, "seq_id": number, "prompt": {"chunks": [{"tokens": [1, 2]}]}}
        return self.api.post("asample", body, who=self.who)

    def poll(self, number: int) -> dict[str, Any]:
        answer: dict[str, Any] = self.api.poll(f"{self.sampler}:{number}", who=self.who).json()
        return answer


@pytest.fixture
def small(configure: Settings, sqlite_url: str, redis_url: str, tmp_path: Path) -> Iterator[Api]:
    """A service that takes 4 samples, 2 of each tenant."""
    limits = {"max_waiting_samples": 4, "max_waiting_samples_per_tenant": 2}
    with running(configure, sqlite_url, redis_url, tmp_path, **limits) as service:
        yield service


@pytest.fixture
def open_to_all(configure: Settings, sqlite_url: str, redis_url: str, tmp_path: Path) -> Iterator[Api]:
    """A service that takes 4 samples, whosever they are."""
    with running(configure, sqlite_url, redis_url, tmp_path, max_waiting_samples=4) as service:
        yield service


def test_a_tenant_over_its_limit_is_asked_to_slow_down_and_others_are_not(small: Api, redis_url: str) -> None:
    alice, bob = Tenant(small, "alice"), Tenant(small, "bob")
    assert [alice.submit(number).status_code for number in range(4)] == [200, 200, 429, 429]
    refused = alice.submit(2)
    assert refused.headers["retry-after"] == "1"
    assert "2 of your samples wait for 'tiny'" in refused.json()["detail"]
    assert bob.submit(0).status_code == 200
    with redis.Redis.from_url(redis_url) as client:
        desk = SampleDesk(client, pool=POOL, worker_id="w", claim_s=60, result_ttl_s=900)
        desk.finish([(f"{alice.sampler}:0", SampleAnswer("proto", b""))])
    assert alice.submit(2).status_code == 200


def test_a_tenant_that_fills_the_pool_leaves_others_their_share(open_to_all: Api) -> None:
    alice, bob = Tenant(open_to_all, "alice"), Tenant(open_to_all, "bob")
    assert [alice.submit(number).status_code for number in range(6)] == [200] * 4 + [429] * 2
    assert [bob.submit(number).status_code for number in range(4)] == [200] * 2 + [429] * 2


def test_who_was_refused_hears_why_from_what_waits_already(small: Api) -> None:
    alice, bob = Tenant(small, "alice"), Tenant(small, "bob")
    for number in range(3):
        alice.submit(number)
    bob.submit(0)
    told = alice.poll(0)
    assert told["queue_state"] == "paused_rate_limit"
    assert "2 of your samples wait" in told["queue_state_reason"]
    assert bob.poll(0) == {"type": "try_again", "request_id": f"{bob.sampler}:0", "queue_state": "active"}


def test_a_full_pool_is_a_matter_of_capacity(open_to_all: Api) -> None:
    alice = Tenant(open_to_all, "alice")
    for number in range(5):
        alice.submit(number)
    told = alice.poll(0)
    assert told["queue_state"] == "paused_capacity"
    assert "too many samples wait" in told["queue_state_reason"]


def test_samples_without_a_live_sampler_wait_for_one(api: Api) -> None:
    alice = Tenant(api, "alice")
    alice.submit(0)
    with api.database.write() as session:
        session.execute(delete(Worker))
    told = alice.poll(0)
    assert told["queue_state"] == "paused_capacity"
    assert "no sample worker of pool tiny" in told["queue_state_reason"]


def test_why_it_waits_is_looked_up_once_for_all_polls_that_end_together(small: Api, redis_url: str) -> None:
    alice = Tenant(small, "alice")
    for number in range(3):
        alice.submit(number)
    with redis.Redis.from_url(redis_url) as client:

        def looks() -> int:
            calls = client.info("commandstats")
            return int(calls.get("cmdstat_get", {"calls": 0})["calls"])  # type: ignore[union-attr]

        alice.poll(0)
        before = looks()
        for _ in range(4):
            assert alice.poll(1)["queue_state"] == "paused_rate_limit"
        assert looks() - before <= 1


@pytest.mark.parametrize("seen", ["silent", "long ago", "lately"])
def test_who_samples_is_not_silent(api: Api, seen: str) -> None:
    alice = Tenant(api, "alice")
    then = utc_now() - timedelta(seconds=10 if seen == "lately" else 70)
    values = {"last_seen_at": then, "silent_since": utc_now() if seen == "silent" else None}
    with api.database.write() as session:
        session.execute(update(ClientSession).values(**values))
    assert alice.submit(0).status_code == 200
    with api.database.read() as session:
        row = session.get_one(ClientSession, alice.session_id)
    assert row.silent_since is None
    assert (row.last_seen_at > then) == (seen != "lately")
