"""Samples in a real Redis: stored once, claimed by one, taken over from the dead, answered or known to be lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal, TypeVar

import pytest
import redis
import redis.asyncio

from app.futures.waiters import DONE_CHANNEL
from app.sampling.endings import forget_samples
from app.sampling.keys import cancel_channel, claim_key, claims_key, request_key, result_key, tokens_key, unfinished_key
from app.sampling.store import Depths, SampleAnswer, SampleDesk, SampleInbox, StoredAnswer
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

    def _with(self, call: Callable[[SampleInbox], Awaitable[T]], depths: Depths = Depths(100, 100)) -> T:
        async def run() -> T:
            async with redis.asyncio.Redis.from_url(self._url) as client:
                return await call(SampleInbox(client, depths=depths))

        return asyncio.run(run())

    def submit(
        self, request_id: str, body: bytes = b"body", *, owner: str = "o", most: int = 100, most_of_one: int = 100
    ) -> bytes | str:
        depths = Depths(most, most_of_one)
        return self._with(lambda inbox: inbox.submit(request_id, "tiny", body, owner_id=owner), depths)

    def refused(self, owner: str) -> str | None:
        return self._with(lambda inbox: inbox.refused("tiny", owner))

    def cancel(self, request_id: str) -> bool:
        return self._with(lambda inbox: inbox.cancel(request_id, "tiny", SampleAnswer.failed("cancelled", "user")))

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


def test_requests_beyond_the_pools_limit_are_turned_away_and_repeats_are_not(inbox: Inbox) -> None:
    inbox.submit(A)
    inbox.submit(B)
    assert inbox.submit(C, most=2) == "pool full"
    assert inbox.submit(A, most=2) == b"body"
    assert inbox.find(C) == (None, False)


def test_requests_beyond_their_owners_limit_are_turned_away_and_others_are_not(inbox: Inbox) -> None:
    inbox.submit(A)
    inbox.submit(B)
    assert inbox.submit(C, most_of_one=2) == "owner full"
    assert inbox.submit(C, owner="other", most_of_one=2) == "new"


def test_who_was_refused_is_known_for_a_while(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    assert inbox.refused("o") is None
    inbox.submit(B, most_of_one=1)
    assert (inbox.refused("o"), inbox.refused("other")) == ("owner full", None)
    inbox.submit(B, most=1)
    assert inbox.refused("o") == "pool full"
    assert all(0 < server.ttl(key) <= 5 for key in server.keys("samples:tiny:refused:*"))  # type: ignore[operator, union-attr]


def test_a_full_pool_keeps_a_share_for_every_owner(inbox: Inbox) -> None:
    """Of 4 places, 2 owners have 2 each and 3 owners have 1, whoever has filled them all."""
    for number in range(4):
        assert inbox.submit(f"s:sample:0:{number}", owner="a", most=4) == "new"
    assert inbox.submit("s:sample:0:4", owner="a", most=4) == "pool full"
    others = [("b", "new"), ("b", "new"), ("b", "pool full"), ("c", "new"), ("c", "pool full"), ("d", "new")]
    for number, (owner, expected) in enumerate(others):
        assert inbox.submit(f"t:sample:0:{number}", owner=owner, most=4) == expected


@pytest.mark.parametrize("end", ["finish", "cancel", "lose"])
def test_a_request_that_is_over_makes_room(inbox: Inbox, server: redis.Redis, end: str) -> None:
    inbox.submit(A)
    if end == "finish":
        desk(server).finish([(A, ANSWER), (A, ANSWER)])
    elif end == "cancel":
        assert inbox.cancel(A)
    else:
        server.delete(request_key(A))
        assert desk(server).claim([A]) == []
    assert inbox.submit(B, most_of_one=1) == "new"
    assert inbox.submit(C, most_of_one=1) == "owner full"
    desk(server).finish([(B, ANSWER)])
    assert not server.keys(f"{unfinished_key('tiny')}:[ow]*")


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


def test_a_request_that_only_waited_at_a_sampler_that_died_is_not_blamed(inbox: Inbox, server: redis.Redis) -> None:
    for request_id in (A, B):
        inbox.submit(request_id)
    for worker in range(4):
        dying = desk(server, f"w{worker}")
        dying.claim([A, B])
        dying.park([A, B])
        dying.begin([B])
        server.delete(claim_key(A), claim_key(B))
    attempts = {claimed.request_id: claimed.attempt for claimed in desk(server).claim([A, B])}
    assert attempts == {A: 1, B: 5}


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


def test_a_request_is_abandoned_again_once_its_claim_has_run_out(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    inbox.submit(B)
    desk(server, claim_s=0.05).claim([A])
    desk(server, "w2").claim([B])
    assert desk(server).abandoned(older_than_s=0) == []
    wait_for(lambda: desk(server).abandoned(older_than_s=0) == [A])
    assert desk(server).abandoned(older_than_s=60) == []


def test_a_request_that_was_given_up_is_abandoned_at_once_and_first(inbox: Inbox, server: redis.Redis) -> None:
    for request_id in (A, B):
        inbox.submit(request_id)
    desk(server).claim([B])
    desk(server).renew([B])
    desk(server).release([B])
    assert desk(server).abandoned(older_than_s=60) == [B]
    assert desk(server).abandoned(older_than_s=0) == [B, A]


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


def test_no_key_of_a_finished_sample_outlives_its_result(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    holder = desk(server)
    holder.claim([A])
    holder.park([A])
    holder.begin([A])
    server.xadd(tokens_key(A), {"t": b"1"})
    holder.finish([(A, ANSWER)])
    holder.begin([A])  # too late: whoever thinks that it holds it leaves no trace either
    holder.release([A])
    left = {key.decode(): server.ttl(key) for key in server.keys(f"sample:{A}:*")}
    assert left.keys() == {request_key(A), result_key(A), tokens_key(A)}
    assert all(0 < ttl_s <= 900 for ttl_s in left.values())


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


def test_a_renewal_tells_which_requests_redis_does_not_know_any_more(inbox: Inbox, server: redis.Redis) -> None:
    for request_id in (A, B):
        inbox.submit(request_id)
    desk(server).claim([A, B])
    server.delete(request_key(A))
    assert desk(server).renew([A, B]) == [A]


def test_a_request_lives_as_long_as_somebody_works_on_it(inbox: Inbox, server: redis.Redis) -> None:
    inbox.submit(A)
    desk(server).claim([A])
    for key in (request_key(A), claims_key(A)):
        server.expire(key, 10)
    desk(server).renew([A])
    assert min(server.ttl(request_key(A)), server.ttl(claims_key(A))) > 1000  # type: ignore[type-var]


def test_thousands_of_claims_are_taken_renewed_and_given_up(inbox: Inbox, server: redis.Redis) -> None:
    ids = [f"s:sample:0:{number}" for number in range(1201)]
    async_submit(inbox, ids)
    assert [claimed.request_id for claimed in desk(server).claim(ids)] == ids
    server.set(result_key(ids[-1]), b"p")
    assert desk(server).renew(ids) == [ids[-1]]
    desk(server).release(ids[:-1])
    assert len(desk(server).abandoned(older_than_s=60, limit=5000)) == 1200


def async_submit(inbox: Inbox, ids: list[str]) -> None:
    async def all_of_them(client: SampleInbox) -> None:
        for request_id in ids:
            await client.submit(request_id, "tiny", b"body", owner_id="o")

    inbox._with(all_of_them, Depths(5000, 5000))


def test_forgotten_requests_are_lost_to_their_clients_and_their_samplers_are_told(
    inbox: Inbox, server: redis.Redis
) -> None:
    for request_id in (A, B, C):
        inbox.submit(request_id)
    desk(server).claim([A])
    desk(server).finish([(B, ANSWER)])
    with server.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(DONE_CHANNEL, cancel_channel("tiny"))
        wait_for(lambda: channel.get_message() is None and channel.subscribed)
        assert forget_samples(server, "tiny", [A, B]) == 1
        notices: list[tuple[bytes, bytes]] = []

        def heard_twice() -> bool:
            notices.extend((m["channel"], m["data"]) for m in [channel.get_message()] if m)
            return len(notices) == 2

        wait_for(heard_twice)
    assert sorted(notices) == [(cancel_channel("tiny").encode(), A.encode()), (DONE_CHANNEL.encode(), A.encode())]
    assert inbox.find(A) == (None, False)
    assert inbox.find(B)[0] is not None
    assert desk(server).renew([A, C]) == [A]
    assert inbox.submit(A, most_of_one=2) == "new"
