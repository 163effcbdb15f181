"""Which rows of a call belong to which adapter.

A `Routing` belongs to the call:

    with routed(Routing.of([(adapter_a, 128), (None, 64), (adapter_b, 64)])):
        hidden = base.hidden(tokens)

It travels in a `ContextVar`, so a training and a sampling thread share the layers without seeing each other's adapters.
A row is one token of a flattened batch. Rows lie ordered by adapter, so that each adapter is one slice: it pays for its
own rank, its own rows and its own targets, and for nobody else's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from workers.model.adapter import Adapter, Factors


class Segment(NamedTuple):
    """The rows `start` … `stop`-1 of a call belong to `adapter`."""

    adapter: Adapter
    start: int
    stop: int


class Term(NamedTuple):
    """What one adapter adds in one layer to the rows `start` … `stop`-1: scale·(x Aᵀ) Bᵀ."""

    start: int
    stop: int
    factors: Factors
    scale: float


@dataclass(frozen=True, eq=False)
class Routing:
    """Which of the `rows` rows of a call belong to which adapter. Rows in no segment see the bare base model."""

    rows: int
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, counts: Iterable[tuple[Adapter | None, int]], *, row_tokens: int = 1) -> Routing:
        """From (adapter or None for the base model, number of sequences) in batch order, each sequence `row_tokens`
        rows long. Neighbours of one adapter become one segment.
        """
        segments: list[Segment] = []
        start = 0
        for adapter, count in counts:
            stop = start + count * row_tokens
            if adapter is not None and stop > start:
                if segments and segments[-1].adapter is adapter and segments[-1].stop == start:
                    segments[-1] = segments[-1]._replace(stop=stop)
                else:
                    segments.append(Segment(adapter, start, stop))
            start = stop
        return cls(start, tuple(segments))

    @cached_property
    def _terms(self) -> dict[str, tuple[Term, ...]]:
        found: dict[str, list[Term]] = {}
        for adapter, start, stop in self.segments:
            for path, factors in adapter.factors.items():
                found.setdefault(path, []).append(Term(start, stop, factors, adapter.scale))
        return {path: tuple(terms) for path, terms in found.items()}

    def terms(self, path: str) -> tuple[Term, ...]:
        """The low-rank terms of the layer `path`, in row order; empty if no adapter here trains it."""
        return self._terms.get(path, ())

    def stretched_terms(self, path: str, sequences: int, rows: int) -> tuple[Term, ...]:
        """`terms` for a layer that sees `rows` rows, some other number for each of the `sequences` sequences than the
        call has: those in a cache too. Raises ValueError if the sequences cannot be told apart.
        """
        if rows == self.rows:
            return self.terms(path)
        old, new = self.rows // sequences, rows // sequences
        terms = self.terms(path)
        if old * sequences != self.rows or any(t.start % old or t.stop % old for t in terms):
            raise ValueError(f"{path}: {rows} rows of {sequences} sequences, the routing is for {self.rows} rows")
        return tuple(t._replace(start=t.start // old * new, stop=t.stop // old * new) for t in terms)


_routing: ContextVar[Routing | None] = ContextVar("tinworks_routing", default=None)


@contextmanager
def routed(routing: Routing | None) -> Iterator[None]:
    """Calls of the model inside this block, in this thread, use `routing`; None is the bare base model."""
    token = _routing.set(routing)
    try:
        yield
    finally:
        _routing.reset(token)


def current_routing() -> Routing | None:
    """The routing in force in this thread."""
    return _routing.get()
