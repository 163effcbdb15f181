"""Whether something grew: the last third of a series against its first, or a service that has run against a new one."""

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
_MINUTE_S = 60.0

Step = tuple[float, float]
"""When a step of a script ended, and how long it took; seconds."""
Window = tuple[float, float]
"""Begin and end on the clock of steps; seconds."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A value before and after, the largest change that counts as none (None: it is only told), the largest value."""

    what: str
    first: float
    last: float
    bound: float | None
    largest: float

    @property
    def change(self) -> float:
        """As a share of the first."""
        return self.last / self.first - 1 if self.first else 0.0

    @property
    def grew(self) -> bool:
        """Whether the last is above the first by more than the bound."""
        return self.bound is not None and self.last - self.first > self.bound

    def line(self) -> str:
        """For people."""
        verdict = "told" if self.bound is None else "GREW" if self.grew else "flat"
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


def tell_latency(steps: Mapping[str, Sequence[Step]]) -> list[Finding]:
    """One finding for each script, in milliseconds, from its steps over the whole time. It is no verdict: a machine
    that is shared may itself become slower. Each minute counts as its lower quartile."""
    found = []
    for name, rows in steps.items():
        minutes = [1e3 * lower_quartile(took) for took in _by_minute(rows)]
        first, last = _ends(minutes)
        found.append(Finding(f"step of {name} (ms)", first, last, None, max(minutes)))
    return found


def judge_latency(rounds: Sequence[Mapping[str, tuple[Sequence[float], Sequence[float]]]]) -> list[Finding]:
    """One finding for each script, in milliseconds: what its steps took with a new service, and with the old one.

    In each round both did the same work on the same machine, one after the other: script → seconds of each step with
    the old one, and with the new one. Rounds count as the ratio of their medians; of those the median is the verdict.
    """
    found = []
    for name in rounds[0]:
        pairs = [(median(old), median(new)) for old, new in (one[name] for one in rounds) if old and new]
        ratio, first = median(old / new for old, new in pairs), 1e3 * median(new for _, new in pairs)
        most = 1e3 * max(old for old, _ in pairs)
        found.append(Finding(f"old/new step of {name}", first, ratio * first, LATENCY_BOUND * first, most))
    return found


def steps_within(steps: Sequence[Step], window: Window) -> list[float]:
    """How long the steps took that began and ended in it."""
    return [took for ended, took in steps if window[0] <= ended - took and ended <= window[1]]


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


def _by_minute(rows: Sequence[Step]) -> list[list[float]]:
    minutes: dict[int, list[float]] = {}
    for at_s, took in rows:
        minutes.setdefault(int(at_s // _MINUTE_S), []).append(took)
    return [minutes[number] for number in sorted(minutes)]
