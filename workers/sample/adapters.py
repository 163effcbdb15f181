"""The adapters that a sampler serves: loaded when a request first asks for one, least recently used leave.

At most `capacity` adapters are in the engine, those that are being loaded included; one that a request uses stays.
Loading happens in threads of its own, so nothing else waits for it, and all requests for one adapter share one load.
Requests are served in the order in which they came: for an adapter that is there at once, for another when its load is
done. One for which there is no room waits for an adapter to become idle; if that takes long, the adapter with the
fewest requests gets no new ones until it has left.

Everything here but the loading is called from the thread that turns the engine.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import structlog

from app.errors import TinworksError
from workers.background import Background
from workers.metrics import ADAPTER_LOADS
from workers.sample.adapter_files import AdapterFiles, NotYetStored
from workers.sample.engines.base import AdapterHandle, Cancelled, Engine
from workers.snapshot_folders import HeldFolder

logger = structlog.get_logger(__name__)

LOADERS = 4
_PATIENCE_S = 1.0
"""How long a request for which there is no room waits before it makes an adapter leave."""
_AGAIN_S = 0.25
_STORED_WITHIN_S = 120.0
"""How long requests wait for a snapshot that is on its way to the blob store."""

Ready = Callable[[AdapterHandle | Exception | None], None]
"""Gets the adapter, None for the base model, or why there is none."""


class NotStored(TinworksError):
    """A snapshot did not arrive in the blob store in time."""


@dataclass(slots=True, eq=False)
class _Resident:
    """An adapter in the engine, or on its way there: then `handle` and `folder` are None."""

    handle: AdapterHandle | None = None
    folder: HeldFolder | None = None
    users: int = 0

    @property
    def idle(self) -> bool:
        return self.folder is not None and not self.users


@dataclass(slots=True)
class _Waiting:
    """The requests that wait for one adapter. `since`: when the first of them came; `not_before`: when to look for the
    files again."""

    since: float
    not_before: float = 0.0
    requests: dict[str, Ready] = field(default_factory=dict)


class AdapterStore:
    """The adapters of one engine."""

    def __init__(
        self,
        engine: Engine,
        files: AdapterFiles,
        *,
        capacity: int,
        prepare_thread: Callable[[], None] | None = None,
    ) -> None:
        """`prepare_thread` is called first in each thread that loads."""
        self._engine = engine
        self._files = files
        self._capacity = capacity
        self._loaders = Background(LOADERS, "adapters", prepare=prepare_thread)
        self._residents: OrderedDict[str, _Resident] = OrderedDict()
        self._line: OrderedDict[str, _Waiting] = OrderedDict()
        self._uses: dict[str, _Resident] = {}
        self._loaded: deque[tuple[str, tuple[AdapterHandle, HeldFolder] | Exception]] = deque()
        self._changed = False
        self._next_look = float("inf")
        self._wake: Callable[[], None] = lambda: None

    def on_event(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, when `turn` has something to do. Said once, before anything is asked for."""
        self._wake = wake

    def ask(self, request_id: str, snapshot_id: str | None, ready: Ready) -> None:
        """Tell `ready` when the adapter of this snapshot is there, from `turn`; of the base model, at once. It is used
        by the request then, until `release`."""
        if snapshot_id is None:
            ready(None)
            return
        waiting = self._line.setdefault(snapshot_id, _Waiting(time.monotonic()))
        waiting.requests[request_id] = ready
        self._changed = True

    def cancel(self, request_id: str) -> bool:
        """Tell a request that waits that it is cancelled. False if it does not wait here."""
        for snapshot_id, waiting in self._line.items():
            if (ready := waiting.requests.pop(request_id, None)) is not None:
                if not waiting.requests:
                    del self._line[snapshot_id]
                self._changed = True
                ready(Cancelled("the request was cancelled"))
                return True
        return False

    def release(self, request_id: str) -> None:
        """The request is done with its adapter, if it has one."""
        if (resident := self._uses.pop(request_id, None)) is not None:
            resident.users -= 1
            self._changed |= resident.idle

    def turn(self) -> None:
        """Take what was loaded, hand out what is there, begin to load what there is room for. Returns at once."""
        while self._loaded:
            self._take(*self._loaded.popleft())
        now = time.monotonic()
        if self._changed or now >= self._next_look:
            self._changed = False
            self._serve(now)

    def stop(self, timeout_s: float) -> None:
        """Load no more, and let go of all adapters; requests that wait are told nothing."""
        self._loaders.stop(timeout_s, finish=False)
        for _, outcome in self._loaded:
            if not isinstance(outcome, Exception):
                self._unload(_Resident(*outcome))
        for resident in self._residents.values():
            self._unload(resident)
        self._residents.clear()

    # -- the line

    def _serve(self, now: float) -> None:
        self._next_look = float("inf")
        full = False
        leaving: set[str] = set()
        for snapshot_id, waiting in list(self._line.items()):
            resident = self._residents.get(snapshot_id)
            if resident is None and waiting.not_before > now:
                self._next_look = min(self._next_look, waiting.not_before)
            elif resident is None:
                full = full or not self._begin(snapshot_id)
                if full and now - waiting.since > _PATIENCE_S:
                    leaving |= self._next_to_leave(leaving)
            elif resident.folder is not None and snapshot_id not in leaving:
                self._hand_out(snapshot_id, resident)

    def _hand_out(self, snapshot_id: str, resident: _Resident) -> None:
        self._residents.move_to_end(snapshot_id)
        for request_id, ready in self._line.pop(snapshot_id).requests.items():
            resident.users += 1
            self._uses[request_id] = resident
            ready(resident.handle)

    def _next_to_leave(self, leaving: set[str]) -> set[str]:
        """The used adapter with the fewest requests, besides those that are `leaving`."""
        used = [
            (resident.users, name)
            for name, resident in self._residents.items()
            if resident.users and name not in leaving
        ]
        return {min(used)[1]} if used else set()

    def _begin(self, snapshot_id: str) -> bool:
        """Begin to load an adapter, in the place of one that is idle if there is no other. False if there is none."""
        evicted = None
        if len(self._residents) >= self._capacity:
            idle = [name for name, resident in self._residents.items() if resident.idle]
            if not idle:
                return False
            name = next((name for name in idle if name not in self._line), idle[0])
            evicted = self._residents.pop(name)
        self._residents[snapshot_id] = _Resident()
        self._loaders.submit(partial(self._load, snapshot_id, evicted))
        return True

    def _take(self, snapshot_id: str, outcome: tuple[AdapterHandle, HeldFolder] | Exception) -> None:
        self._changed = True
        if not isinstance(outcome, Exception):
            resident = self._residents[snapshot_id]
            resident.handle, resident.folder = outcome
            if snapshot_id in self._line:
                self._hand_out(snapshot_id, resident)
            return
        del self._residents[snapshot_id]
        waiting = self._line.get(snapshot_id)
        if waiting is None:
            return
        if isinstance(outcome, NotYetStored):
            now = time.monotonic()
            if now - waiting.since < _STORED_WITHIN_S:
                waiting.not_before = now + _AGAIN_S
                return
            outcome = NotStored(f"the snapshot {snapshot_id} is not in the blob store yet")
        del self._line[snapshot_id]
        for ready in waiting.requests.values():
            ready(outcome)

    # -- in the threads that load

    def _load(self, snapshot_id: str, evicted: _Resident | None) -> None:
        outcome: tuple[AdapterHandle, HeldFolder] | Exception
        try:
            if evicted is not None:
                self._unload(evicted)
            folder = self._files.hold(snapshot_id)
            try:
                outcome = (self._engine.load_adapter(snapshot_id, folder.path), folder)
            except BaseException:
                folder.close()
                raise
        except Exception as error:
            outcome = error
        ADAPTER_LOADS.labels("failed" if isinstance(outcome, Exception) else "done").inc()
        self._loaded.append((snapshot_id, outcome))
        self._wake()

    def _unload(self, resident: _Resident) -> None:
        if resident.folder is not None:
            if resident.handle is not None:
                self._engine.unload_adapter(resident.handle)
            resident.folder.close()
