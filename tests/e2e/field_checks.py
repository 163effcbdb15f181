"""What can be claimed of a request field, and how it is checked.

A field makes a *difference*: two values that are both right are seen apart by the client afterwards. Or a value is
*refused* by the field's name. Or, on purpose and with a reason, the field is *inert*: it is read and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.e2e.field_world import Changes, Refusal, World

TOLERANCE = 1e-4

Probe = Callable[[World, Changes], Any]
"""Sends a request with some fields changed and tells what the client can see afterwards, or how it was refused."""


@dataclass(frozen=True, slots=True)
class Check:
    """A claim about fields. `probe`: None for what needs no request of its own."""

    fields: tuple[str, ...]
    what: str
    holds: Callable[[World], None]
    probe: Probe | None = None

    @property
    def id(self) -> str:
        """For pytest."""
        return f"{self.fields[0]}-{self.what}".replace(" ", "_")


def differs(fields: str, probe: Probe, one: Changes, other: Changes) -> Check:
    """Both values are right, and what follows differs. `fields`: one or more, separated by blanks between ` & `."""

    def holds(world: World) -> None:
        first, second = world.see(probe, one), world.see(probe, other)
        for seen in (first, second):
            assert not isinstance(seen, Refusal), seen
        assert not same(first, second), f"{one} and {other} give the same: {first}"

    return Check(_split(fields), "differs", holds, probe)


def decides(fields: str, probe: Probe, good: Changes, bad: Changes, *words: str) -> Check:
    """One value leads to success, the other to an error that says why."""

    def holds(world: World) -> None:
        seen = world.see(probe, good)
        assert not isinstance(seen, Refusal), seen
        _assert_refused(world.see(probe, bad), words)

    return Check(_split(fields), "decides", holds, probe)


def refused(fields: str, probe: Probe, changes: Changes, *words: str) -> Check:
    """A value is refused, with its name or these words."""
    names = _split(fields)
    expected = words or (names[0].rpartition(".")[2],)

    def holds(world: World) -> None:
        _assert_refused(world.see(probe, changes), expected)

    return Check(names, "refused", holds, probe)


def inert(fields: str, probe: Probe, one: Changes, other: Changes, *, why: str) -> Check:
    """Both values are right, and nothing differs, on purpose."""
    assert why

    def holds(world: World) -> None:
        first, second = world.see(probe, one), world.see(probe, other)
        assert not isinstance(first, Refusal), first
        assert same(first, second), f"{first} != {second}"

    return Check(_split(fields), "is inert", holds, probe)


def shown(fields: str, what: str, holds: Callable[[World], None]) -> Check:
    """Whatever else is to be seen."""
    return Check(_split(fields), what, holds)


def _split(fields: str) -> tuple[str, ...]:
    return tuple(fields.split(" & "))


def _assert_refused(seen: Any, words: Sequence[str]) -> None:
    assert isinstance(seen, Refusal), f"accepted: {seen}"
    assert seen.blames_the_request, seen
    for word in words:
        assert word in seen.text, f"{word!r} is not named by: {seen.text}"


def same(one: Any, other: Any) -> bool:
    """Whether two observations are equal, numbers within `TOLERANCE`."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        if np.shape(one) != np.shape(other):
            return False
        return bool(np.allclose(one, other, atol=TOLERANCE, rtol=0, equal_nan=True))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, int | float):
        return bool(abs(one - other) <= TOLERANCE) or one == other
    return bool(one == other)
