"""When a run is saved for recovery: what its next restore would repeat stays within bounds, at a bounded cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.settings import Settings
from workers.train.bounds import Bounds, Lag

BOUNDS = Bounds(operations=100, body_bytes=1000, seconds=10.0, cost_factor=20.0)


def due(lag: Lag, *, cost_s: float = 0.0, sharers: int = 1, after_step: bool = False) -> bool:
    return BOUNDS.is_due(lag, cost_s=cost_s, sharers=sharers, after_step=after_step)


def test_by_default_ten_seconds_or_twenty_times_the_cost_are_repeated_at_most() -> None:
    bounds = Bounds.of(Settings())
    assert bounds.seconds <= 10.0 and bounds.cost_factor == 20.0


@pytest.mark.parametrize(("cost_s", "most"), [(0.0, 10.0), (0.1, 10.0), (0.5, 10.0), (2.0, 40.0)])
def test_a_run_is_saved_at_the_bound_wherever_it_is(cost_s: float, most: float) -> None:
    assert due(Lag(seconds=most), cost_s=cost_s)
    assert not due(Lag(seconds=most * 0.99), cost_s=cost_s)


@pytest.mark.parametrize("cost_s", [0.0, 2.0])
def test_near_the_bound_it_is_saved_behind_a_step(cost_s: float) -> None:
    near = 0.8 * max(10.0, 20 * cost_s)
    assert due(Lag(seconds=near), cost_s=cost_s, after_step=True)
    assert not due(Lag(seconds=near), cost_s=cost_s)
    assert not due(Lag(seconds=0.5 * near), cost_s=cost_s, after_step=True)


@pytest.mark.parametrize("lag", [Lag(operations=100), Lag(body_bytes=1000)])
def test_operations_and_bytes_wait_for_a_step_until_they_are_twice_too_many(lag: Lag) -> None:
    assert due(lag, after_step=True)
    assert not due(lag)
    assert due(lag + lag)


def test_runs_that_one_death_would_lose_share_the_seconds() -> None:
    assert due(Lag(seconds=2.5), sharers=4)
    assert not due(Lag(seconds=2.4), sharers=4)
    assert not due(Lag(seconds=2.5), sharers=4, cost_s=1.0)


@given(
    passes=st.lists(st.tuples(st.floats(0.001, 3.0), st.booleans()), max_size=200),
    cost_s=st.floats(0.0, 1.0),
    sharers=st.integers(1, 64),
)
def test_snapshots_take_a_bounded_share_and_leave_a_bounded_rest(
    passes: list[tuple[float, bool]], cost_s: float, sharers: int
) -> None:
    lag, computed, spent = Lag(), 0.0, 0.0
    for seconds, after_step in passes:
        lag += Lag(1, 1, seconds)
        computed += seconds
        assert lag.seconds <= max(10.0, 20 * cost_s) + seconds
        if due(Lag(seconds=lag.seconds), cost_s=cost_s, sharers=sharers, after_step=after_step):
            lag, spent = Lag(), spent + cost_s
    assert spent <= computed / (0.75 * 20) + 1e-6
