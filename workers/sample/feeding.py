"""Hands claimed requests on in turn: as many as the engine can run and a few more, so that it never waits for one.

All others wait in the `WaitingRoom`. What has gone into the engine keeps its place there, so a tenant who comes later
waits behind no more than those few. Requests that wait for their adapter have a limit of their own: they keep nobody
else out of an engine that has room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from app.sampling.store import SampleDesk
from app.wire.sampling import StoredSample
from app.wire.types import SampleResult
from workers.sample.engines.base import Engine
from workers.sample.turns import Waiting, WaitingRoom, most_tokens


@dataclass(slots=True)
class _Begun:
    """A request whose turn has come. `prompt` and `sequences` as it asked; `has_adapter`: it is in the engine."""

    prompt: int
    sequences: int
    has_adapter: bool = False


class Feeder:
    """The requests of one sampler on their way into the engine. Used by the thread that turns it only, but for `load`.

    `rows`: sequences that the engine runs at a time. `begin`: called with each request when its turn has come; whoever
    takes it says `in_engine` once it has its adapter, and `ended` when it is over.
    """

    def __init__(self, desk: SampleDesk, engine: Engine, *, rows: int, begin: Callable[[StoredSample], None]) -> None:
        self._desk = desk
        self._engine = engine
        self._rows = rows
        self._spare = max(1, rows // 4)
        self._begin = begin
        self._room: WaitingRoom[StoredSample] = WaitingRoom()
        self._parked: set[str] = set()
        self._begun: dict[str, _Begun] = {}
        self._sequences = {False: 0, True: 0}
        """Of the requests that wait for their adapter, and of those in the engine."""
        self._waiting_sequences = 0

    @property
    def waiting(self) -> int:
        """Requests whose turn has not come."""
        return len(self._room)

    @property
    def room(self) -> int:
        """Requests that it would be good to have, so that the engine does not run dry."""
        return max(0, self._rows + self._spare - self.load)

    @property
    def load(self) -> int:
        """Sequences that this sampler has to do. From any thread."""
        return self._waiting_sequences + self._sequences[False] + self._sequences[True]

    def add(self, stored: StoredSample) -> None:
        """A request was claimed."""
        request = stored.request
        self._room.add(Waiting(request.request_id, stored.owner_id, most_tokens(request), stored))
        self._waiting_sequences += request.num_samples

    def remove(self, request_id: str) -> bool:
        """A request waits no more. False if it did not wait: it has begun, or is not here."""
        stored = self._room.remove(request_id)
        if stored is None:
            return False
        self._waiting_sequences -= stored.request.num_samples
        self._parked.discard(request_id)
        return True

    def feed(self) -> None:
        """Begin what may begin. Raises RedisError; what had its turn then has begun all the same."""
        begun: list[StoredSample] = []
        places = self._places()
        while places > 0 and (stored := self._room.take(self._may_begin)) is not None:
            request = stored.request
            places -= request.num_samples
            self._waiting_sequences -= request.num_samples
            self._begun[request.request_id] = _Begun(len(request.prompt), request.num_samples)
            self._sequences[False] += request.num_samples
            begun.append(stored)
        returning = self._parked.intersection(stored.request.request_id for stored in begun)
        self._parked -= returning
        for stored in begun:
            self._begin(stored)
        self._desk.begin(returning)

    def park(self, request_ids: Iterable[str]) -> None:
        """Note which of these newly claimed requests have to wait. Raises RedisError."""
        new = [request_id for request_id in request_ids if request_id in self._room]
        self._parked.update(new)
        self._desk.park(new)

    def in_engine(self, request_id: str) -> None:
        """A request has its adapter."""
        begun = self._begun[request_id]
        if not begun.has_adapter:
            self._move(begun, has_adapter=True)

    def ended(self, request_id: str, outcome: SampleResult | Exception) -> None:
        """A request that had begun is over."""
        begun = self._begun.pop(request_id, None)
        if begun is None:
            return
        self._sequences[begun.has_adapter] -= begun.sequences
        tokens = sum(len(s.tokens) for s in outcome.sequences) if isinstance(outcome, SampleResult) else 0
        self._room.ended(request_id, tokens=begun.prompt + tokens)

    def surplus(self, *, among: Mapping[str, int] | None = None) -> list[str]:
        """Requests that wait and that others could take, the last to come first: all of them, or, `among` samplers with
        these loads, what brings this one down to their average, if others can run it at once."""
        if among is None:
            return [stored.request.request_id for stored in self._room.newest()]
        average = sum(among.values()) / max(1, len(among))
        idle = sum(max(0, self._rows - load) for load in among.values())
        sequences = min(self.load - average, idle)
        given: list[str] = []
        for stored in self._room.newest():
            sequences -= stored.request.num_samples
            if sequences < 0:
                break
            given.append(stored.request.request_id)
        return given

    def give_up(self, request_ids: Iterable[str]) -> None:
        """Let others take these requests, which wait here. Raises RedisError."""
        given = list(request_ids)
        parked = self._parked.intersection(given)
        for request_id in given:
            self.remove(request_id)
        self._desk.begin(parked)  # since giving up takes back what a claim has counted
        self._desk.release(given)

    def _places(self) -> int:
        """How many sequences may begin. An engine that has some waiting is full: it gets a few more, for the next
        turn."""
        free = self._rows + self._spare - self._sequences[True]
        waiting = self._engine.waiting
        return min(free, self._spare - waiting) if waiting else free

    def _may_begin(self, stored: StoredSample) -> bool:
        return stored.snapshot_id is None or self._sequences[False] < self._rows

    def _move(self, begun: _Begun, *, has_adapter: bool) -> None:
        self._sequences[begun.has_adapter] -= begun.sequences
        begun.has_adapter = has_adapter
        self._sequences[has_adapter] += begun.sequences
