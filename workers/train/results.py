"""Results on their way into the log: in an operation's row when small, else in the blob store; and what they used.

A result that cannot be stored fails its operation, with the reason, and no other: what the run did before it is
committed with it. What the run did after it was computed on a state that the failed operation had changed; it is
computed again once the run has been rebuilt from the log, in which that operation has no effect.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app.billing import meter
from app.billing.meter import Meter
from app.runs.log import FAILED, Finished, Payload
from app.storage.blobs import BlobStore
from workers.train.effects import Effect
from workers.train.slots import Slot

FOLDER = "results"


@dataclass(slots=True)
class Stored:
    """The effects of one run that may be committed, in order, and what the log is told of them. `is_cut`: the last one
    failed here, so that the state in memory is not what the log says."""

    effects: list[Effect] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    is_cut: bool = False


def store_results(effects: Iterable[Effect], blobs: BlobStore, *, inline_bytes: int) -> dict[str, Stored]:
    """Store what the operations of each run (the key) have given; they are in the order of their sequence ids."""
    by_run: dict[str, list[Effect]] = {}
    for effect in effects:
        by_run.setdefault(effect.operation.model_id, []).append(effect)
    return {model_id: _store(mine, blobs, inline_bytes) for model_id, mine in by_run.items()}


def _store(effects: Sequence[Effect], blobs: BlobStore, inline_bytes: int) -> Stored:
    stored = Stored()
    for effect in effects:
        operation = effect.operation
        if effect.failure is None and operation.state != FAILED:
            try:
                payload = Payload.store(effect.result or b"{}", blobs, folder=FOLDER, inline_bytes=inline_bytes)
            except Exception as error:
                effect = Effect(operation)
                effect.fail(error)
                effect.run_values = {"failed": True} if operation.seq_id == 0 else {}
                stored.is_cut = True
            else:
                kind, pass_id = effect.result_kind, effect.pass_id
                stored.finished.append(
                    Finished(operation.model_id, operation.seq_id, result=payload, result_kind=kind, pass_id=pass_id)
                )
        if effect.failure is not None and operation.state != FAILED:
            stored.finished.append(Finished(operation.model_id, operation.seq_id, failure=effect.failure))
        stored.effects.append(effect)
        if stored.is_cut:
            break
    return stored


def used_by(by_run: Mapping[str, Sequence[Effect]], slots: Mapping[str, Slot]) -> dict[Meter, int]:
    """What the operations of each run used."""
    hour = meter.this_hour()
    runs = {model_id: slots[model_id].run for model_id in by_run}
    return meter.summed(
        (Meter(run.owner_id, hour, run.session_id, run.base_model, kind), amount)
        for model_id, run in runs.items()
        for effect in by_run[model_id]
        for kind, amount in effect.usage.items()
    )


def may_pass(error: Exception) -> bool:
    """Whether the database refused something for a reason that lies in it, and not in what it was given."""
    return isinstance(error, OperationalError | InterfaceError | PoolTimeout)
