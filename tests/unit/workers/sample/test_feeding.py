"""How much of what waits goes into the engine, and what is given to others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from app.wire.sampling import StoredSample
from app.wire.types import SampledSequence, SampleRequest, SampleResult, SamplingParams
from workers.sample.feeding import Feeder

ROWS = 8
SPARE = 2


class World:
    """A feeder before an engine that the test looks into, and a desk that notes what is asked of it."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.notes: list[tuple[str, set[str]]] = []
        self.engine = SimpleNamespace(waiting=0)
        desk: Any = SimpleNamespace(**{name: self._noting(name) for name in ("begin", "park", "release")})
        engine: Any = self.engine
        self.feeder = Feeder(desk, engine, rows=ROWS, begin=lambda s: self.begun.append(s.request.request_id))

    def _noting(self, name: str) -> Any:
        return lambda request_ids: self.notes.append((name, set(request_ids)))

    def add(self, owner: str, count: int, *, snapshot: str | None = None, samples: int = 1) -> None:
        for number in range(count):
            request = SampleRequest(f"{owner}{number}", [1], SamplingParams(max_tokens=9), num_samples=samples)
            self.feeder.add(StoredSample(owner, "s", "tiny", snapshot, request))

    def feed(self) -> list[str]:
        self.begun.clear()
        self.feeder.feed()
        return list(self.begun)

    def reach_engine(self, *request_ids: str) -> None:
        for request_id in request_ids:
            self.feeder.in_engine(request_id)

    def end(self, request_id: str) -> None:
        sequence = SampledSequence("stop", np.array([1]), np.array([0.0]), None)
        self.feeder.ended(request_id, SampleResult([sequence]))


def test_an_engine_gets_what_it_can_run_and_a_few_more() -> None:
    world = World()
    world.add("a", 20)
    begun = world.feed()
    world.reach_engine(*begun)
    assert begun == [f"a{i}" for i in range(ROWS + SPARE)]
    assert world.feed() == []
    world.end("a0")
    assert world.feed() == [f"a{ROWS + SPARE}"]
    assert world.feeder.waiting == 20 - ROWS - SPARE - 1


def test_samples_of_one_request_count_each() -> None:
    world = World()
    world.add("a", 4, samples=6)
    world.reach_engine(*(begun := world.feed()))
    assert begun == ["a0", "a1"]
    assert world.feeder.load == 24
    world.end("a0")
    assert world.feeder.load == 18
    assert world.feed() == ["a2"]


def test_an_engine_in_which_some_wait_is_full_though_it_runs_less() -> None:
    """Like one whose cache has no room for more."""
    world = World()
    world.add("a", 20)
    world.engine.waiting = SPARE
    assert world.feed() == []
    world.engine.waiting = SPARE - 1
    assert world.feed() == ["a0"]


def test_requests_that_wait_for_adapters_keep_nobody_else_out() -> None:
    world = World()
    world.add("a", 20, snapshot="cold")
    assert len(world.feed()) == ROWS
    assert world.feed() == []
    world.add("b", 1)
    assert world.feed() == ["b0"]
    world.reach_engine("a0", "a1", "b0")
    assert world.feed() == [f"a{ROWS}", f"a{ROWS + 1}"]


def test_what_has_to_wait_is_parked_and_begins_later() -> None:
    world = World()
    world.add("a", ROWS + SPARE + 2)
    begun = world.feed()
    world.reach_engine(*begun)
    late = {f"a{ROWS + SPARE}", f"a{ROWS + SPARE + 1}"}
    world.feeder.park([*begun, *late])
    assert world.notes[-1] == ("park", late)
    world.end("a0")
    world.end("a1")
    assert set(world.feed()) == late
    assert world.notes[-1] == ("begin", late)


def test_what_is_given_up_is_as_if_it_had_never_been_claimed() -> None:
    world = World()
    world.add("a", ROWS + SPARE + 2)
    begun = world.feed()
    parked = f"a{ROWS + SPARE}"
    world.feeder.park([*begun, parked])
    given = world.feeder.surplus()
    world.feeder.give_up(given)
    assert world.notes[-2:] == [("begin", {parked}), ("release", set(given))]
    assert world.feeder.waiting == 0
    assert world.feeder.load == ROWS + SPARE


def test_others_get_what_brings_a_sampler_down_to_their_average() -> None:
    world = World()
    world.add("a", 30)
    world.reach_engine(*world.feed())
    assert world.feeder.surplus(among={"me": 30, "other": 30}) == []
    assert world.feeder.surplus(among={"me": 30}) == []
    assert world.feeder.surplus(among={"me": 30, "idle": 0}) == [f"a{i}" for i in range(29, 29 - ROWS, -1)]
    assert len(world.feeder.surplus(among={"me": 30, "idle": 0, "too": 6})) == 2 + ROWS
    assert len(world.feeder.surplus(among={"me": 30, "busy": 28, "idle": 7})) == 1


def test_a_removed_request_is_no_load() -> None:
    world = World()
    world.add("a", 3)
    assert world.feeder.remove("a1")
    assert not world.feeder.remove("a1")
    assert world.feeder.load == 2
    assert world.feed() == ["a0", "a2"]
    assert not world.feeder.remove("a0")
