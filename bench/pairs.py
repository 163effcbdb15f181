"""Ratios that a noisy machine cannot fake: the two sides alternate, and each pair of neighbours is one observation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

WARM_UP, WARM_UP_S = 3, 10.0
"""Pairs that are not counted: so many, or those of the first seconds if that is less."""
RESAMPLES = 2000


@dataclass(frozen=True)
class Ratio:
    """The median over pairs, the 95 % bootstrap interval around it, and the medians of the two sides."""

    median: float
    low: float
    high: float
    ours: float
    theirs: float

    def scaled(self, share: float) -> Ratio:
        """As if theirs had taken `share` times as long: for a side that did only a part of the work."""
        return replace(
            self, median=share * self.median, low=share * self.low, high=share * self.high, theirs=share * self.theirs
        )

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of `theirs[i]` / `ours[i]`: above 1 ours is less."""
    pairs = np.asarray(theirs) / np.asarray(ours)
    draw = np.random.default_rng(0).integers(0, len(pairs), (RESAMPLES, len(pairs)))
    low, high = np.quantile(np.median(pairs[draw], axis=1), (0.025, 0.975))
    middle = float(np.median(pairs))
    return Ratio(middle, float(low), float(high), float(np.median(ours)), float(np.median(theirs)))


def timed(ours: Callable[[], object], theirs: Callable[[], object], pairs: int) -> Ratio:
    """How many times as fast `ours` is; milliseconds of both. Who goes first changes from pair to pair."""
    times: dict[Callable[[], object], list[float]] = {ours: [], theirs: []}
    begin, warm = time.perf_counter(), 0
    while len(times[ours]) < warm + pairs:
        number = len(times[ours])
        if number < WARM_UP and time.perf_counter() - begin < WARM_UP_S:
            warm = number + 1
        for step in (ours, theirs) if number % 2 else (theirs, ours):
            start = time.perf_counter()
            step()
            times[step].append(1e3 * (time.perf_counter() - start))
    return ratio(times[ours][warm:], times[theirs][warm:])
