"""What became of an operation, and how an error of its execution is told to its client."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import structlog
from sqlalchemy.orm import Session

from app.billing.meter import UsageKind
from app.errors import InvalidRequest, StorageUnavailable
from app.runs.log import Failure, Ready
from workers.model.memory import OutOfMemory, is_out_of_memory
from workers.train.slots import RunState, Slot
from workers.train.snapshots import BadSnapshot

log = structlog.get_logger(__name__)

Bodies = Mapping[tuple[str, int], bytes]
"""Request bodies by `(model_id, seq_id)`."""


@dataclass(slots=True)
class Effect:
    """What became of an operation. `rows` are written, `run_values` set, and `usage` is counted in the commit that
    finishes it; `then` is called after it.

    `write`: its files on their way to where readers find them; until that is done it is not committed (`held`).
    `seconds`: its part of the time that computing took. `error`: what the failure was made of, if it was one.
    `pass_id`: the pass that has computed it, as nobody else's is called.
    """

    operation: Ready
    result: bytes | None = None
    result_kind: str = "json"
    failure: Failure | None = None
    rows: list[Callable[[Session], None]] = field(default_factory=list)
    run_values: dict[str, Any] = field(default_factory=dict)
    usage: dict[UsageKind, int] = field(default_factory=dict)
    write: Future[Any] | None = None
    then: list[Callable[[], None]] = field(default_factory=list)
    seconds: float = 0.0
    error: Exception | None = None
    pass_id: int | None = None

    def fail(self, error: Exception) -> None:
        """The operation has failed, of this."""
        self.failure, self.error = failure_of(self.operation, error), error


def share_time(effects: Sequence[Effect], *, since: float) -> Sequence[Effect]:
    """Note what the operations that were computed together since then (monotonic seconds) took, each by its tokens."""
    seconds = time.monotonic() - since
    total = sum(effect.operation.tokens + 1 for effect in effects)
    for effect in effects:
        effect.seconds = seconds * (effect.operation.tokens + 1) / total
    return effects


class NoState(Exception):
    """The run's creation failed on the worker, so there is nothing to operate on."""


def state_of(slot: Slot) -> RunState:
    if slot.state is None:
        raise NoState
    return slot.state


def failure_of(operation: Ready, error: Exception) -> Failure:
    if isinstance(error, InvalidRequest):
        return Failure(error.detail, error.category)
    if isinstance(error, BadSnapshot):
        return Failure(f"{operation.kind}: {error}", "user")
    if isinstance(error, NoState):
        return Failure("model_id: the run takes no operations, since its creation failed", "user")
    if isinstance(error, StorageUnavailable):
        log.warning("operation_not_stored", model_id=operation.model_id, seq_id=operation.seq_id, reason=error.reason)
        return Failure(f"{operation.kind}: {error.detail}", "server")
    if is_out_of_memory(error):
        return _does_not_fit(operation, error)
    return _server_failure(operation, error)


def _does_not_fit(operation: Ready, error: Exception) -> Failure:
    log.error("operation_out_of_memory", model_id=operation.model_id, seq_id=operation.seq_id, exc_info=error)
    detail = error.detail if isinstance(error, OutOfMemory) else "the worker has no memory left for it; try again later"
    return Failure(f"{operation.kind}: {detail}", "server")


def _server_failure(operation: Ready, error: Exception) -> Failure:
    log.error("operation_failed", model_id=operation.model_id, seq_id=operation.seq_id, exc_info=error)
    return Failure(f"{operation.kind} failed on the server ({type(error).__name__}); its log has the details", "server")
