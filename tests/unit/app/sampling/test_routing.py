"""Prompts with one beginning have one home; homes are spread, move little, and are passed over when they are full."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.sampling.routing import LOAD_FACTOR, LOAD_SLACK, by_weight, choose, prefix_key

workers = st.lists(st.uuids().map(str), min_size=2, max_size=8, unique=True)
keys = st.binary(min_size=16, max_size=16)
KEYS = [np.random.default_rng(seed).bytes(16) for seed in range(2000)]


def idle(names: list[str]) -> dict[str, int]:
    return dict.fromkeys(names, 0)


def test_prompts_that_begin_alike_have_one_key() -> None:
    beginning = list(range(256))
    assert prefix_key("x", [*beginning, 1], tokens=256) == prefix_key("x", [*beginning, 2, 3], tokens=256)
    assert prefix_key("x", [1, *beginning], tokens=256) != prefix_key("x", [2, *beginning], tokens=256)


def test_a_shorter_prompt_counts_whole() -> None:
    assert prefix_key(None, [1, 2], tokens=256) == prefix_key(None, [1, 2], tokens=256)
    assert prefix_key(None, [1, 2], tokens=256) != prefix_key(None, [1, 2, 3], tokens=256)


def test_adapters_share_no_cache() -> None:
    assert len({prefix_key(name, [1, 2], tokens=256) for name in (None, "one", "two")}) == 3


@given(keys, workers)
def test_the_home_depends_on_neither_order_nor_a_small_load(key: bytes, names: list[str]) -> None:
    home = choose(key, idle(names))
    assert choose(key, idle(names[::-1])) == home
    assert choose(key, idle(names) | {home: LOAD_SLACK - 1}) == home
    assert by_weight(key, names)[0] == home


@given(keys, workers)
def test_a_home_with_too_much_to_do_is_passed_over_for_the_next_in_order(key: bytes, names: list[str]) -> None:
    first, second = by_weight(key, names)[:2]
    loads = dict.fromkeys(names, 1000)
    assert choose(key, loads) == first
    assert choose(key, loads | {first: 1000 * 4}) == second


@given(keys, st.dictionaries(st.uuids().map(str), st.integers(0, 10**6), min_size=1, max_size=8))
def test_nobody_is_chosen_who_has_more_than_his_part(key: bytes, loads: dict[str, int]) -> None:
    chosen = choose(key, loads)
    assert loads[chosen] < LOAD_FACTOR * sum(loads.values()) / len(loads) + LOAD_SLACK


@given(workers)
def test_keys_are_spread(names: list[str]) -> None:
    """The number of a home's keys is binomial; seven standard deviations are never passed."""
    counts = Counter(choose(key, idle(names)) for key in KEYS)
    share = 1 / len(names)
    bound = 7 * (len(KEYS) * share * (1 - share)) ** 0.5
    assert all(abs(counts[name] - len(KEYS) * share) < bound for name in names)


@given(workers, st.uuids().map(str))
def test_a_new_worker_takes_its_share_and_nothing_else_moves(names: list[str], new: str) -> None:
    names = [name for name in names if name != new]
    moved = 0
    for key in KEYS:
        before, after = choose(key, idle(names)), choose(key, idle([*names, new]))
        assert after in (before, new)
        moved += after != before
    share = 1 / (len(names) + 1)
    assert abs(moved - len(KEYS) * share) < 7 * (len(KEYS) * share * (1 - share)) ** 0.5
