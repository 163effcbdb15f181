"""Slots of the KV pool: placing rows by group, moving them, growing."""

from __future__ import annotations

import random

import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.sample.engines.kv_cache import KVPool, grown, placed


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=30))
def test_placed_rows_fill_the_front_group_by_group(rows: list[tuple[int, int]]) -> None:
    rows.sort(key=lambda row: row[0])
    groups, slots = [g for g, _ in rows], [s for _, s in rows]
    targets = placed(groups, slots)
    assert sorted(targets) == list(range(len(rows)))
    by_slot = sorted(zip(targets, groups, strict=True))
    assert [group for _, group in by_slot] == sorted(groups)


def test_a_row_that_leaves_moves_one_row_per_group() -> None:
    groups = [0] * 10 + [1] * 10 + [2] * 10
    slots = list(range(30))
    del groups[3], slots[3]
    targets = placed(groups, slots)
    assert sum(slot != target for slot, target in zip(slots, targets, strict=True)) == 3


def test_rows_in_place_stay() -> None:
    assert placed([0, 0, 1], [1, 0, 2]) == [1, 0, 2]


@given(st.integers(1, 500), st.integers(1, 5000), st.integers(1, 100_000))
def test_growth_gives_what_is_asked_and_more_only_within_the_budget(rows: int, length: int, budget: int) -> None:
    wide, long = grown(rows, length, budget)
    assert wide >= rows
    assert long >= length
    assert wide * long <= max(budget, rows * length)


def test_moves_happen_as_if_at_once_and_survive_growth() -> None:
    rng = random.Random(0)
    pool = KVPool(10_000)
    pool.reserve(8, 16, live_rows=0, live_length=0)
    like = torch.zeros(1, 2, 1, 3)
    keys, values = pool.layer(0, like, like)
    for slot in range(8):
        keys[slot], values[slot] = slot, -slot
    pool.move([0, 1, 1, 7], [1, 0, 5, 2], 16)
    expected = [1, 0, 7, 3, 4, 1, 6, 7]
    rows = rng.randint(20, 40)
    pool.reserve(rows, 100, live_rows=8, live_length=16)
    keys, values = pool.layer(0, like, like)
    assert keys.shape[0] >= rows
    assert keys.shape[1] >= 100
    assert keys[:8, 5, 1, 2].tolist() == expected
    assert values[:8, 15, 0, 0].tolist() == [-x for x in expected]
    assert (keys[:8, 16:] == 0).all()
    pool.clear(2)
    assert (keys[2] == 0).all()
