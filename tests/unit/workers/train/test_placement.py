"""Which runs leave their slots, and which go to another worker."""

from __future__ import annotations

import time

import pytest

from app.fleet.service import Load
from app.runs.models import Run
from workers.train import placement
from workers.train.slots import Slot

NOW = time.monotonic()


def slot(
    name: str,
    *,
    idle_s: float = 0.0,
    pause_s: float | None = None,
    here_s: float = 0.0,
    cost_s: float = 0.0,
    read_s: float = 0.0,
) -> Slot:
    times = {"last_used": NOW - idle_s, "since": NOW - here_s, "pause_s": pause_s}
    times |= {"snapshot_cost_s": cost_s, "read_s": read_s}
    return Slot(run=Run(id=name), epoch=1, applied_seq=0, **times)  # type: ignore[arg-type]


def names(slots: list[Slot]) -> list[str]:
    return [slot.run.id for slot in slots]


def test_the_idle_run_that_is_expected_back_last_leaves_first() -> None:
    every_ten_s = slot("every ten seconds", idle_s=8, pause_s=10)
    every_hour = slot("every hour", idle_s=5, pause_s=3600)
    gone = slot("gone", idle_s=7200, pause_s=10)
    new = slot("new", idle_s=60)
    busy = slot("busy", idle_s=9000)
    found = placement.idle_runs([every_ten_s, every_hour, gone, new, busy], {"busy"}, now=NOW)
    assert names(found) == ["gone", "every hour", "new", "every ten seconds"]


def test_of_runs_that_are_expected_back_alike_the_least_recently_used_leaves_first() -> None:
    found = placement.idle_runs([slot("b", idle_s=0.2), slot("a", idle_s=0.7), slot("c")], set(), now=NOW)
    assert names(found) == ["a", "b", "c"]


def test_a_run_learns_how_long_its_client_pauses() -> None:
    one = slot("one")
    for _ in range(4):
        one.note_work(one.last_used + 12.0)
    assert one.pause_s == pytest.approx(12.0)
    assert one.next_use_s(one.last_used + 2.0) == pytest.approx(10.0)


def test_the_turn_of_a_run_is_as_long_as_swapping_it_is_dear() -> None:
    cheap, dear = slot("cheap", here_s=40), slot("dear", here_s=40, cost_s=5.0)
    oldest, idle, slow = slot("oldest", here_s=50), slot("idle", here_s=90), slot("slow to read", here_s=90, read_s=5.0)
    slots, busy = [cheap, dear, oldest, idle, slow], {"cheap", "dear", "oldest", "slow to read"}
    found = placement.runs_that_had_their_turn(slots, busy, now=NOW, slice_s=30, cost_factor=20)
    assert names(found) == ["oldest", "cheap"]


# -- who goes elsewhere


def load(*, queued: int, runs: int = 0, slots: int = 8) -> Load:
    return Load("other", queued, runs, slots)


def given_up(here: list[Slot], others: list[Load], *, queued: int, busy: frozenset[str] = frozenset()) -> list[str]:
    return names(placement.runs_to_give_up(here, busy, others, queued_tokens=queued, now=NOW))


HERE = [slot(name, idle_s=idle_s) for name, idle_s in (("a", 1), ("b", 2), ("c", 3), ("d", 4))]


def test_a_loaded_worker_gives_up_as_many_idle_runs_as_make_both_hold_equally_many() -> None:
    assert given_up(HERE, [load(queued=0)], queued=100) == ["d", "c"]
    assert given_up(HERE, [load(queued=0, runs=2)], queued=100) == ["d"]
    assert given_up(HERE, [load(queued=0, runs=3)], queued=100) == []


def test_it_gives_them_up_for_a_worker_that_has_much_less_to_do() -> None:
    assert given_up(HERE, [load(queued=50)], queued=100) == []
    assert given_up(HERE, [load(queued=90), load(queued=49)], queued=100) == ["d", "c"]
    assert given_up(HERE, [load(queued=0)], queued=0) == []
    assert given_up(HERE, [], queued=100) == []


def test_it_gives_up_no_more_than_the_other_has_room_for() -> None:
    assert given_up(HERE, [load(queued=0, runs=1, slots=2)], queued=100) == ["d"]


def test_runs_with_work_stay_and_so_do_those_that_are_not_expected_back_soon() -> None:
    gone = slot("gone", idle_s=3600)
    assert given_up([*HERE, gone], [load(queued=0)], queued=100, busy=frozenset("abc")) == ["d"]
