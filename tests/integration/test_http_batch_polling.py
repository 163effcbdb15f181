"""`retrieve_futures`: every sample of a client is told once it is over, until the client says that it knows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from app.futures import polls
from app.sampling import feeds
from app.sampling.keys import feed_of, request_key, result_key
from app.sampling.scripts import FEED_LENGTH
from app.sampling.store import SampleAnswer, SampleDesk
from tests.factories import POOL
from tests.integration.conftest import Api, running
from tests.services import RedisServer, wait_for

CLONE = 1_000_000_000
Settings = Callable[..., None]


@pytest.fixture
def api(configure: Settings, sqlite_url: str, redis_url: str, tmp_path: Path) -> Iterator[Api]:
    """A service that asks its clients to poll in batches."""
    with running(configure, sqlite_url, redis_url, tmp_path, sample_use_retrieve_futures=True) as service:
        yield service


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def desk(server: redis.Redis) -> SampleDesk:
    return SampleDesk(server, pool=POOL, worker_id="w", claim_s=60, result_ttl_s=900)


def new_sampler(api: Api, who: str = "alice") -> str:
    body = {"session_id": api.session(who), "sampling_session_seq_id": 0, "base_model": "tiny"}
    return str(api.ok("create_sampling_session", body, who=who)["sampling_session_id"])


@pytest.fixture
def sampler(api: Api) -> str:
    return new_sampler(api)


def submit(api: Api, sampler: str, seq_id: int) -> str:
    body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": {"chunks": [{"tokens": [1]}]}}
    return str(api.ok("asample", body)["request_id"])


def ask(
    api: Api, sampler: str, cursor: int = 0, *, clone: int = 0, who: str = "alice", **fields: Any
) -> httpx.Response:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": clone}
    body = {"target": target, "prev_cursor": cursor, "retrieved_request_ids": []} | fields
    return api.post("retrieve_futures", body, who=who)


def news(api: Api, sampler: str, cursor: int = 0, **fields: Any) -> tuple[dict[str, int | None], int]:
    """Size of the result by request id, None for a failure; and the cursor."""
    answer = ask(api, sampler, cursor, **({"timeout": 0} | fields))
    assert answer.status_code == 200, answer.text
    found = {}
    for each in answer.json()["completions"]:
        assert (each["state"] == "failed") == ("response_payload_uncompressed_size" not in each)
        found[each["request_id"]] = each.get("response_payload_uncompressed_size")
    return found, answer.json()["cursor"]


def done(payload: bytes = b"12345") -> SampleAnswer:
    return SampleAnswer("proto", payload)


def test_what_has_ended_is_told_with_the_size_of_its_result(api: Api, sampler: str, desk: SampleDesk) -> None:
    good, bad, _ = (submit(api, sampler, number) for number in range(3))
    desk.finish([(good, done()), (bad, SampleAnswer.failed("no", "user"))])
    assert news(api, sampler)[0] == {good: 5, bad: None}
    assert api.poll(good).content == b"12345"
    assert api.poll(bad).json()["error"] == "no"


def test_it_is_told_again_until_it_is_acknowledged(api: Api, sampler: str, desk: SampleDesk) -> None:
    first, second = submit(api, sampler, 0), submit(api, sampler, 1)
    desk.finish([(first, done())])
    told, cursor = news(api, sampler)
    assert news(api, sampler) == (told, cursor)
    desk.finish([(second, done(b"1"))])
    more, later = news(api, sampler, cursor)
    assert more == {second: 1}
    assert later > cursor
    assert news(api, sampler, later) == ({}, later)
    assert news(api, sampler)[0] == {second: 1}  # the last one is dropped by the acknowledgement after it


def test_every_client_of_a_sampling_session_hears_of_its_own(api: Api, sampler: str, desk: SampleDesk) -> None:
    ids = [submit(api, sampler, seq_id) for seq_id in (0, CLONE, CLONE + 1, 7 * CLONE)]
    desk.finish([(request_id, done()) for request_id in ids])
    assert set(news(api, sampler)[0]) == {ids[0]}
    assert set(news(api, sampler, clone=1)[0]) == {ids[1], ids[2]}
    assert set(news(api, sampler, clone=7)[0]) == {ids[3]}
    assert news(api, sampler, clone=2)[0] == {}


def test_a_poll_without_news_is_held_and_its_cursor_stays(api: Api, sampler: str) -> None:
    began = time.monotonic()
    answer = ask(api, sampler, 17)
    assert time.monotonic() - began >= 0.2
    assert answer.json() == {"completions": [], "cursor": 17}


@pytest.mark.parametrize("timeout", [0, 0.01, 1e9, None])
def test_a_client_may_ask_for_less_time_and_not_for_more(api: Api, sampler: str, timeout: float | None) -> None:
    began = time.monotonic()
    assert ask(api, sampler, timeout=timeout).status_code == 200
    assert time.monotonic() - began < 5


def test_a_held_poll_is_answered_by_the_notice(
    configure: Settings, sqlite_url: str, redis_url: str, tmp_path: Path, desk: SampleDesk
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path, sweep_s=3600, poll_hold_s=30) as api:
        sampler = new_sampler(api)
        waiting = api.client.app.state.services.waiters._waiting  # type: ignore[attr-defined]
        assert news(api, sampler)[0] == {}  # whoever reads his feed has one, whatever the setting says
        request_id = submit(api, sampler, 0)
        with ThreadPoolExecutor(1) as pool:
            polling = pool.submit(news, api, sampler, timeout=None)
            wait_for(lambda: feed_of(request_id) in waiting)
            desk.finish([(request_id, done())])
            assert polling.result(10)[0] == {request_id: 5}


def test_an_api_process_that_did_not_accept_them_tells_them_too(
    configure: Settings, sqlite_url: str, redis_url: str, tmp_path: Path, desk: SampleDesk
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path, sample_use_retrieve_futures=True) as api:
        sampler = new_sampler(api)
        request_id = submit(api, sampler, 0)
    with running(configure, sqlite_url, redis_url, tmp_path, sample_use_retrieve_futures=True) as other:
        desk.finish([(request_id, done())])
        assert news(other, sampler)[0] == {request_id: 5}


def test_where_nobody_reads_feeds_none_is_kept(
    configure: Settings, sqlite_url: str, redis_url: str, tmp_path: Path, server: redis.Redis, desk: SampleDesk
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path) as api:
        request_id = submit(api, new_sampler(api), 0)
        desk.finish([(request_id, done())])
        assert not server.keys("feed:*")


def test_a_request_that_redis_does_not_know_any_more_has_failed(
    api: Api, sampler: str, server: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "_LOOK_EVERY_MS", 1)
    lost, kept = submit(api, sampler, 0), submit(api, sampler, 1)
    server.delete(request_key(lost))
    told, cursor = news(api, sampler)
    assert told == {lost: None}
    assert api.poll(lost).status_code == 410
    assert api.poll(kept).status_code == 408
    assert news(api, sampler, cursor) == ({}, cursor)


def test_a_result_that_expired_before_its_client_came_has_failed(
    api: Api, sampler: str, server: redis.Redis, desk: SampleDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "_LOOK_EVERY_MS", 1)
    request_id = submit(api, sampler, 0)
    desk.finish([(request_id, done())])
    server.delete(request_key(request_id), result_key(request_id))
    wait_for(lambda: ask(api, sampler, timeout=0).json()["completions"][-1]["state"] == "failed")
    assert api.poll(request_id).status_code == 410


def test_samples_that_went_with_redis_are_told_as_failed(
    configure: Settings, sqlite_url: str, own_redis: RedisServer, tmp_path: Path
) -> None:
    with running(configure, sqlite_url, own_redis.url, tmp_path, sample_use_retrieve_futures=True) as api:
        sampler = new_sampler(api)
        with redis.Redis.from_url(own_redis.url) as client:
            desk = SampleDesk(client, pool=POOL, worker_id="w", claim_s=60, result_ttl_s=900)
            first, lost, unheard, late, clone = (submit(api, sampler, number) for number in (0, 1, 2, 3, CLONE))
            desk.finish([(first, done())])
            told, cursor = news(api, sampler)
            assert set(told) == {first}
            news(api, sampler, cursor)  # an acknowledgement: of this one nobody needs to hear again
            desk.finish([(unheard, done())])
            remembered = api.client.app.state.services.accepted._ids  # type: ignore[attr-defined]
            wait_for(lambda: set(remembered) == {lost, unheard, late, clone})
        own_redis.stop()
        own_redis.start()
        with redis.Redis.from_url(own_redis.url) as client:  # a sampler that has gone on working
            SampleDesk(client, pool=POOL, worker_id="w", claim_s=60, result_ttl_s=900).finish([(late, done())])
        wait_for(lambda: ask(api, sampler, cursor).json().get("completions"))
        after, later = news(api, sampler, cursor)
        assert after in ({lost: None, unheard: None, late: 5}, {lost: None, unheard: None, late: None})
        assert later > cursor
        assert news(api, sampler, clone=1)[0] == {clone: None}
        assert api.poll(lost).status_code == 410


def test_delivered_results_go_soon_and_only_the_clients_own(
    api: Api, sampler: str, server: redis.Redis, desk: SampleDesk
) -> None:
    mine, waiting, theirs = submit(api, sampler, 0), submit(api, sampler, 1), submit(api, new_sampler(api), 0)
    desk.finish([(mine, done()), (theirs, done())])
    news(api, sampler, retrieved_request_ids=[mine, waiting, theirs, "no such id", ""])
    left = [server.ttl(result_key(request_id)) for request_id in (mine, theirs)]
    assert left[0] <= 60 < left[1]  # type: ignore[operator]
    assert api.poll(mine).content == b"12345"
    assert server.ttl(request_key(waiting)) > 60  # type: ignore[operator]


def test_a_feed_is_bounded_and_ends_by_itself(
    api: Api, sampler: str, server: redis.Redis, desk: SampleDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [submit(api, sampler, number) for number in range(3)]
    feed = feed_of(ids[0])
    server.zadd(f"{feed}:log", {f"x old{number}": number + 1 for number in range(FEED_LENGTH)})
    desk.finish([(request_id, done()) for request_id in ids])
    assert server.zcard(f"{feed}:log") == FEED_LENGTH
    assert all(server.ttl(f"{feed}:{part}") > 0 for part in ("log", "open"))  # type: ignore[operator]
    monkeypatch.setattr(feeds, "READ_AT_MOST", 100)
    first, cursor = news(api, sampler)
    second, later = news(api, sampler, cursor)
    assert (len(first), len(second)) == (100, 100)
    assert not set(first) & set(second) and later > cursor


def test_only_an_unknown_sampling_session_is_not_found(api: Api, sampler: str) -> None:
    assert ask(api, sampler, who="bob").status_code == 404
    assert ask(api, "s:sample:9").status_code == 404
    api.ok(f"sessions/{sampler.partition(':')[0]}/finish", {"reason": {"type": "success"}})
    assert ask(api, sampler, timeout=0).status_code == 200


@pytest.mark.parametrize(
    "fields", [{"prev_cursor": -1}, {"timeout": -1}, {"target": {"type": "run"}}, {"limit": 5}, {"prev_cursor": "x"}]
)
def test_a_poll_that_cannot_be_is_refused_by_field(api: Api, sampler: str, fields: dict[str, Any]) -> None:
    assert ask(api, sampler, **fields).status_code == 422


def test_a_poll_while_redis_is_away_is_held_and_asked_again(
    configure: Settings, monkeypatch: pytest.MonkeyPatch, sqlite_url: str, own_redis: RedisServer, tmp_path: Path
) -> None:
    monkeypatch.setattr(polls, "OUTAGE_HOLD_S", 0.05)
    with running(configure, sqlite_url, own_redis.url, tmp_path) as api:
        sampler = new_sampler(api)
        own_redis.stop()
        assert ask(api, sampler).status_code == 408
        own_redis.start()
        assert ask(api, sampler).status_code == 200


# -- join


def test_no_two_clients_get_the_same_number(each_api: Api) -> None:
    sampler, other = new_sampler(each_api), new_sampler(each_api)

    def join(identity: str) -> int:
        body = {"sampling_session_id": identity, "type": "join_sampling_session"}
        return int(each_api.ok("join_sampling_session", body)["client_counter"])

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(join, [sampler] * 12)) == list(range(1, 13))
    assert join(other) == 1


def test_nobody_joins_what_is_not_his_or_finished(api: Api, sampler: str) -> None:
    body = {"sampling_session_id": sampler}
    assert api.post("join_sampling_session", body, who="bob").status_code == 404
    assert api.post("join_sampling_session", {"sampling_session_id": "s:sample:9"}).status_code == 404
    api.ok(f"sessions/{sampler.partition(':')[0]}/finish", {"reason": {"type": "success"}})
    assert api.post("join_sampling_session", body).status_code == 410
