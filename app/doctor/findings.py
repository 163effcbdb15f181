"""What the doctor finds: each finding has a name, how bad it is, what was seen, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from app.settings import Settings

Grade = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One look at one thing. `todo`: what mends it; empty where nothing has to."""

    name: str
    grade: Grade
    seen: str
    todo: str = ""


def ok(name: str, seen: str) -> Finding:
    """It is as it should be."""
    return Finding(name, "ok", seen)


def warning(name: str, seen: str, todo: str) -> Finding:
    """It works, but somebody should know."""
    return Finding(name, "warning", seen, todo)


def failed(name: str, seen: str, todo: str) -> Finding:
    """Something will not work."""
    return Finding(name, "failed", seen, todo)


Check = Callable[[Settings], Iterable[Finding]]


def cause(error: BaseException) -> str:
    """The first line of an error, which for databases is the one that says something."""
    inner = getattr(error, "orig", None) or error
    lines = str(inner).strip().splitlines()
    return lines[0] if lines else type(inner).__name__
