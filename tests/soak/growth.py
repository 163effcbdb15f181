"""Whether a series of measurements grows: its last third against its first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from tests.soak.look import Look

MEMORY_BOUND = 0.05
COUNT_BOUND = 0.05
LATENCY_BOUND = 0.10
_FLOOR = {"memory": 2.0, "files": 2.0, "connections": 2.0, "threads": 2.0, "keys": 16.0}
"""So much more is never growth: MiB of memory, and numbers of the rest."""
_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class Finding:
    """A value in the first and the last third, the largest change that counts as none, and the largest value."""

    what: str
    first: float
    last: float
    bound: float
    largest: float

    @property
    def change(self) -> float:
        """As a share of the first."""
        return self.last / self.first - 1 if self.first else 0.0

    @property
    def grew(self) -> bool:
        """Whether the last third is above the first by more than the bound."""
        return self.last - self.first > self.bound

    def line(self) -> str:
        """For people."""
        verdict = "GREW" if self.grew else "flat"
        numbers = f"{self.first:9.1f} -> {self.last:9.1f}  {self.change:+6.1%}  (most {self.largest:.1f})"
        return f"{verdict}  {self.what:24s} {numbers}"


def judge(looks: Sequence[Look]) -> list[Finding]:
    """One finding for each value."""
    found = []
    for what in looks[0].values:
        series = [look.values[what] for look in looks]
        kind = what.split()[0]
        share = MEMORY_BOUND if kind == "memory" else COUNT_BOUND
        first, last = _ends(series)
        found.append(Finding(what, first, last, max(share * first, _FLOOR[kind]), max(series)))
    return found


def judge_latency(steps: Mapping[str, Sequence[tuple[float, float]]]) -> list[Finding]:
    """One finding for each script, in milliseconds, from (when a step ended, how long it took), in seconds.

    Each minute counts as its lower quartile, which what else a machine does raises least.
    """
    found = []
    for name, rows in steps.items():
        minutes = [1e3 * lower_quartile(took) for took in _by_window(rows)]
        first, last = _ends(minutes)
        found.append(Finding(f"step of {name} (ms)", first, last, LATENCY_BOUND * first, max(minutes)))
    return found


def _ends(series: Sequence[float]) -> tuple[float, float]:
    """Medians of the first and of the last third."""
    third = len(series) // 3
    if third == 0:
        raise ValueError("a series needs three measurements at least")
    return median(series[:third]), median(series[-third:])


def lower_quartile(values: Iterable[float]) -> float:
    """The value that a quarter of them are below."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4]


def _by_window(rows: Sequence[tuple[float, float]]) -> list[list[float]]:
    windows: dict[int, list[float]] = {}
    for at_s, took in rows:
        windows.setdefault(int(at_s // _WINDOW_S), []).append(took)
    return [windows[number] for number in sorted(windows)]
