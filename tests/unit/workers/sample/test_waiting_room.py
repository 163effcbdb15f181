"""Turns go round the tenants by tokens; of one tenant's requests the first to come is the first to go."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from app.wire.types import SampleRequest, SamplingParams
from workers.sample.turns import UNLIMITED_TOKENS, Waiting, WaitingRoom, most_tokens

LARGEST = 50


def waiting(owner: str, number: int, tokens: int = 10) -> Waiting[str]:
    return Waiting(f"{owner}{number}", owner, tokens, f"{owner}{number}")


def room_of(*requests: Waiting[str]) -> WaitingRoom[str]:
    room: WaitingRoom[str] = WaitingRoom()
    for request in requests:
        room.add(request)
    return room


def taken(room: WaitingRoom[str], count: int) -> list[str]:
    return [item for item in (room.take() for _ in range(count)) if item is not None]


def test_one_request_goes_before_all_but_a_few_of_another_tenants_thousands() -> None:
    room = room_of(*(waiting("a", i) for i in range(5000)))
    taken(room, 100)
    room.add(waiting("b", 0))
    assert "b0" in taken(room, 2)


def test_a_tenants_requests_keep_their_order() -> None:
    room = room_of(*(waiting("a", i, tokens=1 + i % 3) for i in range(20)))
    assert taken(room, 30) == [f"a{i}" for i in range(20)]
    assert not len(room)


def test_a_request_is_there_once() -> None:
    room = room_of(waiting("a", 0), waiting("a", 0))
    assert taken(room, 2) == ["a0"]
    room.add(waiting("a", 0))
    assert room.take() is None
    room.ended("a0", tokens=10)
    room.add(waiting("a", 0))
    assert room.take() == "a0"


def test_a_removed_request_has_no_turn() -> None:
    room = room_of(waiting("a", 0), waiting("a", 1))
    assert room.remove("a0") == "a0"
    assert room.remove("a0") is None
    assert taken(room, 2) == ["a1"]
    assert room.remove("a1") is None


def test_a_tenant_who_was_away_has_saved_nothing_up() -> None:
    room = room_of(waiting("b", 0))
    assert room.take() == "b0"
    room.ended("b0", tokens=10)
    for i in range(100):
        room.add(waiting("a", i))
    taken(room, 50)
    for i in range(1, 50):
        room.add(waiting("b", i))
    got = "".join(item[0] for item in taken(room, 20))
    assert 9 <= got.count("b") <= 11


def test_a_newcomer_does_not_wait_for_what_others_were_charged_and_got_back() -> None:
    room = room_of(*(waiting("a", i, tokens=30_000) for i in range(100)))
    for item in taken(room, 10):
        room.ended(item, tokens=20)
    room.add(waiting("b", 0))
    assert "b0" in taken(room, 2)


def test_what_a_request_did_not_use_is_given_back() -> None:
    room = room_of(*(waiting("a", i, tokens=100) for i in range(30)), *(waiting("b", i) for i in range(30)))
    for _ in range(30):
        for item in taken(room, 1):
            room.ended(item, tokens=10)
    assert 14 <= sum(room.remove(f"a{i}") is None for i in range(30)) <= 16


def test_a_tenant_whose_first_request_may_not_begin_is_passed_over_and_keeps_its_turn() -> None:
    room = room_of(waiting("a", 0), waiting("a", 1), waiting("b", 0), waiting("b", 1))
    assert room.take(lambda item: item != "a0") == "b0"
    assert room.take(lambda item: item != "a0") == "b1"
    assert room.take(lambda item: item != "a0") is None
    assert taken(room, 2) == ["a0", "a1"]


def test_the_newest_are_those_who_came_last_of_every_tenant() -> None:
    room = room_of(*(waiting("a", i) for i in range(4)), waiting("b", 0), waiting("b", 1))
    assert list(room.newest()) == ["a3", "b1", "a2", "b0", "a1", "a0"]


def test_the_most_that_a_request_may_come_to() -> None:
    def request(max_tokens: int | None, samples: int) -> SampleRequest:
        return SampleRequest("r", [1] * 10, SamplingParams(max_tokens=max_tokens), num_samples=samples)

    assert most_tokens(request(5, 3)) == 25
    assert most_tokens(request(None, 2)) == 10 + 2 * UNLIMITED_TOKENS


requests = st.tuples(st.sampled_from("abcd"), st.integers(1, LARGEST), st.integers(0, LARGEST))
steps = st.lists(st.one_of(requests, st.sampled_from(["take", "end", "remove"])), max_size=120)


@given(steps)
def test_every_request_leaves_once_and_in_its_tenants_order(script: list[tuple[str, int, int] | str]) -> None:
    room: WaitingRoom[str] = WaitingRoom()
    came: dict[str, list[str]] = defaultdict(list)
    used: dict[str, int] = {}
    running: list[str] = []
    for number, step in enumerate(script):
        if isinstance(step, tuple):
            owner, tokens, used_tokens = step
            room.add(waiting(owner, number, tokens))
            came[owner].append(f"{owner}{number}")
            used[f"{owner}{number}"] = used_tokens
        elif step == "take":
            item = room.take()
            assert (item is None) == (not any(came.values()))
            if item is not None:
                assert came[item[0]].pop(0) == item
                running.append(item)
        elif step == "end" and running:
            item = running.pop(0)
            room.ended(item, tokens=used[item])
        elif step == "remove" and any(came.values()):
            item = next(line for line in came.values() if line).pop()
            assert room.remove(item) == item
        assert len(room) == sum(map(len, came.values()))


@given(st.lists(st.integers(1, LARGEST), min_size=60, max_size=60), st.integers(1, 4), st.integers(0, 3))
def test_tenants_that_all_wait_get_as_many_tokens_each(sizes: list[int], tenants: int, head_start: int) -> None:
    """Any two differ by the largest request of each at most; head starts do not count."""
    room: WaitingRoom[str] = WaitingRoom()
    tokens: dict[str, int] = {}

    def send(owner: str) -> None:
        for number, size in enumerate(sizes):
            tokens[f"{owner}{number}"] = size
            room.add(waiting(owner, number, size))

    send("a")
    taken(room, head_start)
    got = {"a": 0}
    for owner in "bcde"[:tenants]:
        send(owner)
        got[owner] = 0
    for _ in range(50):
        item = room.take()
        assert item is not None
        got[item[0]] += tokens[item]
        assert max(got.values()) - min(got.values()) <= 2 * LARGEST
