"""Samples in a real Redis: stored once, claimed by one, taken over from the dead, answered or known to be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal, TypeVar

import pytest
import redis
import redis.asyncio

from app.futures.waiters import DONE_CHANNEL
from app.sampling.keys import claim_key, request_key, result_key, unfinished_key
from app.sampling.store import SampleAnswer, SampleDesk, SampleInbox, StoredAnswer
from tests.services import wait_for

T = TypeVar("T")
A, B, C = (f"s:sample:0:{number}" for number in range(3))
ANSWER = SampleAnswer("proto", b"answer")


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def desk(server: redis.Redis, worker_id: str = "w1", *, claim_s: float = 60.0) -> SampleDesk:
    return SampleDesk(server, pool="tiny", worker_id=worker_id, claim_s=claim_s, result_ttl_s=900)


class Inbox:
    """The API's side, called from a test that is not asynchronous."""

    def __init__(self, url: str) -> None:
        self._url = url

    def _with(self, call: Callable[[SampleInbox], Awaitable[T]], max_waiting: int = 100) -> T:
        async def run() -> T:
            async with redis.asyncio.Redis.from_url(self._url) as client:
                return await call(SampleInbox(client, max_waiting=max_waiting))

        return asyncio.run(run())

    def submit(self, request_id: str, body: bytes = b"body", *, max_waiting: int = 100) -> bytes | str:
        return self._with(lambda inbox: inbox.submit(request_id, "tiny", body), max_waiting)

    def find(self, request_id: str, *, at_most: int | None = None) -> tuple[StoredAnswer | None, bool]:
        return self._with(lambda inbox: inbox.find(request_id, at_most=at_most))

    def finished(self, *request_ids: str) -> set[str]:
        return self._with(lambda inbox: inbox.finished(request_ids))


@pytest.fixture
def inbox(redis_url: str) -> Inbox:
    return Inbox(redis_url)


def test_a_new_request_is_stored(inbox: Inbox) -> None:
    assert inbox.submit(A) == "new"
    assert inbox.find(A) == (None, True)


def test_a_repeated_request_gives_back_what_was_stored(inbox: Inbox) -> None:
    inbox.submit(A, b"first")
    assert inbox.submit(A, b"second") == b"first"


def test_requests_beyond_the_limit_are_turned_away_and_repeats_are_not(inbox: Inbox) -> None:
    inbox.submit(A)
    inbox.submit(B)
    assert inbox.submit(C, max_waiting=2) == "full"
    assert inbox.submit(A, max_waiting=2) == b"body"
    assert inbox.find(C) == (None, False)


def test_a_finished_request_makes_room(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    desk(server).finish([(A, ANSWER)])
    assert inbox.submit(B, max_waiting=1) == "new"


def test_a_request_is_claimed_by_one_sampler(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    (claimed,) = desk(server).claim([A])
    assert (claimed.request_id, claimed.body, claimed.attempt) == (A, b"body", 1)
    assert desk(server, "w2").claim([A]) == []
    assert desk(server).claim([A]) == []


def test_of_several_requests_those_that_are_free_are_claimed(inbox: Inbox, server: redis.Redis) -> None:
    for request_id in (A, B, C):
        inbox.submit(request_id)
    desk(server, "w2").claim([B])
    assert [claimed.request_id for claimed in desk(server).claim([A, B, C])] == [A, C]


def test_an_unknown_or_finished_request_cannot_be_claimed(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    desk(server).finish([(A, ANSWER)])
    assert desk(server).claim([A, "s:sample:0:9"]) == []


def test_a_claim_that_is_not_renewed_runs_out(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    desk(server, claim_s=0.02).claim([A])
    wait_for(lambda: not server.exists(claim_key(A)))
    (claimed,) = desk(server, "w2").claim([A])
    assert claimed.attempt == 2


def test_a_renewed_claim_does_not_run_out(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    desk(server, claim_s=0.5).claim([A])
    desk(server, claim_s=60).renew([A])
    assert server.pttl(claim_key(A)) > 1000  # type: ignore[operator]
    assert desk(server, "w2").claim([A]) == []


def test_a_claim_that_was_given_up_is_free_at_once(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    desk(server).claim([A])
    desk(server).release([A])
    assert desk(server, "w2").claim([A])


def test_only_claims_whose_holder_died_are_counted(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    for worker in range(4):
        desk(server, f"w{worker}").claim([A])
        desk(server, f"w{worker}").release([A])
    (claimed,) = desk(server).claim([A])
    assert claimed.attempt == 1


def test_requests_that_nobody_claims_are_abandoned(inbox: Inbox, server: redis.Redis) -> None:
    for request_id in (A, B, C):
        inbox.submit(request_id)
    desk(server).claim([A])
    desk(server).finish([(B, ANSWER)])
    assert desk(server, "w2").abandoned(older_than_s=0) == [C]
    assert desk(server, "w2").abandoned(older_than_s=60) == []


def test_the_oldest_abandoned_request_comes_first(inbox: Inbox, server: redis.Redis) -> None:
    for request_id in (C, A, B):
        inbox.submit(request_id)
    assert desk(server).abandoned(older_than_s=0) == [C, A, B]
    assert desk(server).abandoned(older_than_s=0, limit=1) == [C]


def test_a_request_whose_body_was_lost_is_dropped_when_it_is_claimed(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    server.delete(request_key(A))
    assert desk(server).claim([A]) == []
    assert server.zcard(unfinished_key("tiny")) == 0


@pytest.mark.parametrize("kind", ["proto", "error"])
def test_a_result_is_found_as_it_was_given_and_again(
    inbox: Inbox, server: redis.Redis, kind: Literal["proto", "error"]
) -> None:
    inbox.submit(A)
    answer = SampleAnswer(kind, b"\x00bytes")
    desk(server).finish([(A, answer)])
    for _ in range(2):
        assert inbox.find(A) == (StoredAnswer(kind, 6, [b"\x00bytes"]), True)


def test_a_result_ends_the_claim_and_tells_the_polls(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    inbox.submit(B)
    desk(server).claim([A, B])
    with server.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(DONE_CHANNEL)
        wait_for(lambda: channel.get_message() is None and channel.subscribed)
        desk(server).finish([(A, ANSWER), (B, ANSWER)])
        notices: list[bytes] = []
        wait_for(lambda: notices.extend(m["data"] for m in [channel.get_message()] if m) or notices)
    assert notices == [f"{A}\n{B}".encode()]
    assert not server.exists(claim_key(A), claim_key(B))


def test_a_result_is_kept_for_its_time(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    desk(server).finish([(A, ANSWER)])
    assert 0 < server.ttl(result_key(A)) <= 900  # type: ignore[operator]


def test_a_request_is_not_taken_for_pending_once_its_result_has_gone(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    desk(server).finish([(A, ANSWER)])
    assert server.ttl(request_key(A)) <= server.ttl(result_key(A))  # type: ignore[operator]


def test_what_redis_has_lost_is_known_to_be_lost(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    server.flushall()
    assert inbox.find(A) == (None, False)
    assert inbox.submit(A) == "new"


def test_finished_and_lost_requests_are_news_and_pending_ones_are_not(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    inbox.submit(B)
    desk(server).finish([(A, ANSWER)])
    assert inbox.finished(A, B, C) == {A, C}


def test_a_large_result_comes_in_pieces(inbox: Inbox, server: redis.Redis) -> None:
    payload = bytes(range(256)) * 4096 * 3 + b"end"
    inbox.submit(A)
    desk(server).finish([(A, SampleAnswer("proto", payload))])
    found, _ = inbox.find(A)
    assert found is not None
    assert (found.size, b"".join(found.pieces)) == (len(payload), payload)
    assert len(found.pieces) == 4


def test_a_result_larger_than_asked_for_comes_without_its_payload_and_a_failure_never_does(
    inbox: Inbox, server: redis.Redis
) -> None:
    for request_id, kind in ((A, "proto"), (B, "error")):
        inbox.submit(request_id)
        desk(server).finish([(request_id, SampleAnswer(kind, b"12345"))])  # type: ignore[arg-type]
    assert inbox.find(A, at_most=4) == (StoredAnswer("proto", 5, ()), True)
    assert inbox.find(A, at_most=5) == (StoredAnswer("proto", 5, [b"12345"]), True)
    assert inbox.find(B, at_most=4) == (StoredAnswer("error", 5, [b"12345"]), True)


def test_the_first_result_stays(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    desk(server).finish([(A, ANSWER)])
    desk(server, "w2").finish([(A, SampleAnswer("proto", b"another"))])
    assert inbox.find(A) == (StoredAnswer("proto", 6, [b"answer"]), True)


def test_a_renewal_tells_what_needs_no_more_work(inbox: Inbox, server: redis.Redis) -> None:
    for request_id in (A, B):
        inbox.submit(request_id)
    desk(server).claim([A, B])
    desk(server, "w2").finish([(A, ANSWER)])
    assert desk(server).renew([A, B]) == [A]
    assert not server.exists(claim_key(A))
