"""Replay: the log behind a snapshot, applied once more for its effect on a run's state. Results are thrown away.

Passes are repeated as they were. Operations that were computed together, also those of several runs that are restored
together, are computed together again: the same shapes give the same bits, and it takes no longer than it did.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from structlog.contextvars import bound_contextvars

from app.db import Database
from app.runs import log
from app.runs.log import FAILED, Failure, Ready
from app.storage.blobs import BlobStore
from workers.train.effects import Bodies, Effect, share_time
from workers.train.execute import Executor, consume_failed
from workers.train.planner import STEP_KIND, is_control
from workers.train.slots import Slot

Key = int | tuple[str, int]
"""What a pass is known by: its id, or its only operation, if a release has computed it that gave passes none."""


class CannotReplay(RuntimeError):
    """An operation that had succeeded failed when it was repeated: without it the state would be another than its
    client was told."""


class Replay:
    """Of some runs, all together. `errors`: why some of them could not be repeated. `seconds`: what each has taken."""

    def __init__(
        self,
        slots: Mapping[str, Slot],
        logs: Mapping[str, Sequence[Ready]],
        executor: Executor,
        database: Database,
        blobs: BlobStore,
    ) -> None:
        self._slots = slots
        self._queues = {model_id: deque(operations) for model_id, operations in logs.items() if operations}
        self._executor = executor
        self._database = database
        self._blobs = blobs
        self._members: dict[Key, set[str]] = {}
        for model_id, operations in logs.items():
            for operation in operations:
                self._members.setdefault(_key(operation), set()).add(model_id)
        self.errors: dict[str, Exception] = {}
        self.seconds = dict.fromkeys(logs, 0.0)

    def run(self) -> None:
        """Repeat everything, each run's operations in their order."""
        while self._queues:
            heads = {model_id: queue[0] for model_id, queue in self._queues.items()}
            alone = [one for one in heads.values() if one.state == FAILED or is_control(one)]
            steps = [one for one in heads.values() if one.kind == STEP_KIND and one.state != FAILED]
            if alone:
                for operation in alone:
                    self._apply([operation], self._apply_alone)
            elif steps:
                self._apply(steps, lambda some, bodies: self._executor.step(some, self._slots, bodies))
            else:
                self._repeat_pass(self._next_pass(heads))

    def _next_pass(self, heads: Mapping[str, Ready]) -> Key:
        """A pass that is next for all who had a part in it. There is one: the one that was first of those left."""
        keys = {model_id: _key(operation) for model_id, operation in heads.items()}
        ready = (
            key for key in keys.values() if all(keys[other] == key for other in self._members[key] if other in keys)
        )
        return next(ready, next(iter(keys.values())))

    def _repeat_pass(self, key: Key) -> None:
        operations: list[Ready] = []
        for queue in self._queues.values():
            if _key(queue[0]) == key:
                operations += _of_pass(queue, key)
        if any(one.kind == "forward_backward" for one in operations):
            self._apply(operations, lambda some, bodies: self._executor.forward(some, self._slots, bodies))
        else:
            self._passed(operations)  # nothing of it has changed a state

    def _apply_alone(self, operations: Sequence[Ready], bodies: Bodies) -> Sequence[Effect]:
        (operation,) = operations
        slot = self._slots[operation.model_id]
        if operation.state == FAILED:
            consume_failed(operation, slot)
            return []
        with bound_contextvars(model_id=operation.model_id, request_id=operation.request_id):
            return [self._executor.control(operation, slot, bodies, replay=True)]

    def _apply(self, operations: Sequence[Ready], apply: Callable[[Sequence[Ready], Bodies], Sequence[Effect]]) -> None:
        """Apply the next operations of runs, those of all together. Whoever's fault it is if that fails is left out."""
        began, bodies = time.monotonic(), self._load(operations)
        operations = [one for one in operations if one.model_id not in self.errors]
        try:
            effects = share_time(apply(operations, bodies), since=began) if operations else []
        except Exception as error:
            for operation in operations:
                self._fail(operation.model_id, error)
            return
        for effect in effects:
            self.seconds[effect.operation.model_id] += effect.seconds
            if effect.failure is not None and effect.operation.state != FAILED:
                self._fail(effect.operation.model_id, _cannot_replay(effect, effect.failure))
        self._passed([one for one in operations if one.model_id not in self.errors])

    def _load(self, operations: Sequence[Ready]) -> Bodies:
        bodies: dict[tuple[str, int], bytes] = {}
        for model_id in {operation.model_id for operation in operations}:
            mine = [one for one in operations if one.model_id == model_id and one.state != FAILED]
            try:
                with self._database.read() as session:
                    bodies |= log.load_bodies(session, self._blobs, mine)
            except Exception as error:
                self._fail(model_id, error)
        return bodies

    def _passed(self, operations: Sequence[Ready]) -> None:
        for operation in operations:
            queue = self._queues[operation.model_id]
            queue.popleft()
            if not queue:
                del self._queues[operation.model_id]

    def _fail(self, model_id: str, error: Exception) -> None:
        self.errors.setdefault(model_id, error)
        self._queues.pop(model_id, None)


def _cannot_replay(effect: Effect, failure: Failure) -> CannotReplay:
    error = CannotReplay(f"operation {effect.operation.seq_id}: {failure.message}")
    error.__cause__ = effect.error
    return error


def _key(operation: Ready) -> Key:
    return (operation.model_id, operation.seq_id) if operation.pass_id is None else operation.pass_id


def _of_pass(queue: deque[Ready], key: Key) -> list[Ready]:
    """The run's part of a pass: up to the last operation of it, with those between that have failed."""
    part: list[Ready] = []
    length = 0
    for operation in queue:
        if _key(operation) == key:
            length = len(part) + 1
        elif operation.state != FAILED:
            break
        part.append(operation)
    return part[:length]
