"""The keys and values of all running sequences, one slot each, as a cache that any transformers decoder takes.

`KVPool` holds the buffers. A forward pass gets a small view of it (`PrefillView`, `DecodeView`) that knows where this
pass writes and what it reads, so that nothing about a call is kept in the model or in the pool.

Letters in shapes: B sequences, L new tokens, C cached tokens, H key-value heads, E head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

MIN_ROWS, MIN_LENGTH = 8, 64


class KVPool:
    """Per layer two buffers [rows, length, H, E], made when the layer first writes and grown by `reserve`.

    Unwritten cells are zero: attention multiplies what it masks by 0, which is harmless only for finite numbers.
    `budget`: rows × length that growth should stay within, though what is asked for is always given.
    """

    def __init__(self, budget: int) -> None:
        self.rows = 0
        self.length = 0
        self.budget = budget
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, index: int, key_BHLE: Tensor, value_BHLE: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of a layer, shaped after what it is about to write."""
        if index not in self._layers:
            self._layers[index] = (self._zeros(key_BHLE), self._zeros(value_BHLE))
        return self._layers[index]

    def _zeros(self, like_BHLE: Tensor) -> Tensor:
        _, heads, _, size = like_BHLE.shape
        return like_BHLE.new_zeros(self.rows, self.length, heads, size)

    def reserve(self, rows: int, length: int, *, live_rows: int, live_length: int) -> None:
        """Make room for `rows` slots of `length` tokens. The first `live_rows` slots keep their first `live_length`
        tokens. For a moment old and new buffers exist side by side; if memory does not suffice, the old ones stay."""
        if rows <= self.rows and length <= self.length:
            return
        capacity = grown(rows, length, self.budget)
        live = slice(min(live_rows, self.rows)), slice(min(live_length, self.length))
        self._layers = {
            index: (resized(keys, capacity, live), resized(values, capacity, live))
            for index, (keys, values) in self._layers.items()
        }
        self.rows, self.length = capacity

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of each source slot to its target, as if all at once. A source may have many
        targets."""
        if not sources:
            return
        for buffers in self._layers.values():
            for buffer in buffers:
                source = torch.tensor(sources, device=buffer.device)
                buffer[torch.tensor(targets, device=buffer.device), :length] = buffer[source, :length]

    def clear(self, slot: int) -> None:
        """Zero a slot whose numbers may not be finite. One that is none is no error."""
        if not 0 <= slot < self.rows:
            return
        for buffers in self._layers.values():
            for buffer in buffers:
                buffer[slot] = 0


def resized(old: Tensor, capacity: tuple[int, int], live: tuple[slice, slice]) -> Tensor:
    """A buffer of another capacity (rows, length) with the live part of `old` in it."""
    new = old.new_zeros(*capacity, *old.shape[2:])
    new[live] = old[live]
    return new


def grown(rows: int, length: int, budget: int) -> tuple[int, int]:
    """Capacities ≥ (rows, length), doubled ahead of need as far as their product stays within `budget`."""
    wide = max(MIN_ROWS, 1 << (rows - 1).bit_length())
    if wide * length > budget:
        wide = rows
    long = max(MIN_LENGTH, 1 << (length - 1).bit_length())
    if wide * long > budget:
        long = max(length, budget // wide)
    return wide, long


class PrefillView(Cache):
    """A pass over L tokens of B prompts, all of which have `offset` tokens cached. They go to the slots from `start`
    on, or, without a pool, nowhere."""

    def __init__(self, pool: KVPool | None, start: int, offset: int) -> None:
        super().__init__(layers=[])
        self._pool = pool
        self._start = start
        self._offset = offset

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, L, E], return all keys and values so far [B, H, C, E]."""
        if self._pool is None:
            return key_states, value_states
        stop, end = self._start + key_states.shape[0], self._offset + key_states.shape[2]
        keys, values = self._pool.layer(layer_idx, key_states, value_states)
        keys[self._start : stop, self._offset : end] = key_states.transpose(1, 2)
        values[self._start : stop, self._offset : end] = value_states.transpose(1, 2)
        if self._offset == 0:
            return key_states, value_states
        return keys[self._start : stop, :end].transpose(1, 2), values[self._start : stop, :end].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens cached before this pass."""
        return self._offset

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys in sight, position of the first)."""
        return self._offset + query_length, 0


class DecodeView(Cache):
    """A pass over one token of each of the slots `start` … `stop`-1, each at its own position.

    `cells_B` int64 [B]: slot · pool.length + position. `length`: the pass sees cells 0 … length-1 of each slot, and a
    mask says which count.
    """

    def __init__(self, pool: KVPool, start: int, stop: int, cells_B: Tensor, length: int) -> None:
        super().__init__(layers=[])
        self._pool = pool
        self._start = start
        self._stop = stop
        self._cells_B = cells_B
        self._length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, H, 1, E], return the cells in sight [B, H, C, E]."""
        keys, values = self._pool.layer(layer_idx, key_states, value_states)
        keys.view(-1, *keys.shape[2:]).index_copy_(0, self._cells_B, key_states.squeeze(2))
        values.view(-1, *values.shape[2:]).index_copy_(0, self._cells_B, value_states.squeeze(2))
        rows = slice(self._start, self._stop)
        return keys[rows, : self._length].transpose(1, 2), values[rows, : self._length].transpose(1, 2)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused, since the pass brings its mask and positions."""
        return self._length - 1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys in sight, position of the first)."""
        return self._length, 0


def placed(groups: Sequence[int], slots: Sequence[int]) -> list[int]:
    """New slots for rows such that slots 0 … B-1 are in use and each group is one run of them, moving few rows.

    `groups`: each row's group, ascending. `slots`: where each row is now; rows may share one. Returns each row's new
    slot.
    """
    targets = [-1] * len(groups)
    begin = 0
    while begin < len(groups):
        end = begin
        while end < len(groups) and groups[end] == groups[begin]:
            end += 1
        free = set(range(begin, end))
        for row in range(begin, end):
            if slots[row] in free:
                free.remove(slots[row])
                targets[row] = slots[row]
        holes = iter(sorted(free))
        for row in range(begin, end):
            if targets[row] < 0:
                targets[row] = next(holes)
        begin = end
    return targets
