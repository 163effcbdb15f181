"""Flat buffers of several runs, cut into pieces and worked on a group of pieces at a time.

A group is the unit of `torch._foreach_*` calls: on a GPU one holds the buffers of many runs, so that the number of
kernel launches follows the number of parameters and not that of runs; on a CPU one stays in the cache, so that
the dozen passes of an optimizer step go to memory once. Where a run is cut depends on nothing but its own length, so
its numbers are the same in any company.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sizes:
    """The most elements of a piece and of a group. A piece may be the larger of the two, and is then a group alone."""

    piece: int
    group: int


CPU_SIZES = Sizes(piece=1 << 18, group=1 << 16)
"""A dozen passes over what is in the cache, with few enough calls for it; larger groups also allocate more temporaries
at once than malloc keeps at hand."""

DEVICE_SIZES = Sizes(piece=1 << 26, group=1 << 26)
"""Bounds a step's temporaries, which are a few buffers of a group."""


def sizes(device: torch.device) -> Sizes:
    """How to cut on this device."""
    return CPU_SIZES if device.type == "cpu" else DEVICE_SIZES


def groups(runs: Sequence[tuple[Tensor, ...]]) -> Iterator[tuple[list[int], list[list[Tensor]]]]:
    """Groups of pieces of all runs, in order. Each run gives equally many tensors, all [P] of its own P.

    Yields the index of each piece's run, and for each of the tensors the list of its pieces, which are views.
    """
    most = sizes(runs[0][0].device)
    owners: list[int] = []
    pieces: list[tuple[Tensor, ...]] = []
    held = 0
    for index, tensors in enumerate(runs):
        for piece in _cut(tensors, most.piece):
            elements = piece[0].numel()
            if pieces and held + elements > most.group:
                yield owners, [list(column) for column in zip(*pieces, strict=True)]
                owners, pieces, held = [], [], 0
            owners.append(index)
            pieces.append(piece)
            held += elements
    yield owners, [list(column) for column in zip(*pieces, strict=True)]


def _cut(tensors: tuple[Tensor, ...], elements: int) -> Iterable[tuple[Tensor, ...]]:
    if tensors[0].numel() <= elements:
        return (tensors,)
    return zip(*(tensor.split(elements) for tensor in tensors), strict=True)


class Norms:
    """L2 norms of what comes in pieces."""

    def __init__(self) -> None:
        self._runs: list[int] = []
        self._parts: list[Tensor] = []

    def add(self, runs: Sequence[int], pieces: list[Tensor]) -> None:
        """Count each piece into the norm of its run, in float64."""
        self._runs += runs
        self._parts += torch._foreach_norm(pieces, 2, dtype=torch.float64)

    def add_moderate(self, runs: Sequence[int], pieces: list[Tensor]) -> None:
        """The same of elements whose squares are in the range of float32; on a CPU in half the time."""
        if pieces[0].device.type != "cpu":
            return self.add(runs, pieces)
        self._runs += runs
        self._parts += [_blockwise_norm(piece) for piece in pieces]

    def read(self) -> dict[int, float]:
        """The norm of each run, all fetched in one transfer. In float64 it is finite exactly if all elements are."""
        squares: defaultdict[int, float] = defaultdict(float)
        parts = torch.stack(self._parts).tolist() if self._parts else []
        for run, part in zip(self._runs, parts, strict=True):
            squares[run] += part * part
        return {run: math.sqrt(square) for run, square in squares.items()}


def _blockwise_norm(x: Tensor) -> Tensor:
    """In float32 over blocks, whose sums are short enough to be exact to 1e-7, then in float64 over those."""
    if x.numel() >= 8192 and x.numel() % 64 == 0:
        x = torch.linalg.vector_norm(x.view(-1, 64), dim=1)
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


class StepNorms:
    """Norms of runs' new weights, and of how far they moved."""

    def __init__(self) -> None:
        self._norms = Norms()

    def add(self, runs: Sequence[int], weights: list[Tensor], before: list[Tensor]) -> None:
        """Count pieces of runs' weights, and of the weights of before, which are overwritten."""
        torch._foreach_sub_(before, weights)
        keys = [2 * run for run in runs] + [2 * run + 1 for run in runs]
        self._norms.add_moderate(keys, weights + before)

    def read(self) -> dict[int, tuple[float, float]]:
        """Of each run the norm of its weights and that of its update, all fetched in one transfer."""
        found = self._norms.read()
        return {key // 2: (norm, found[key + 1]) for key, norm in found.items() if key % 2 == 0}
