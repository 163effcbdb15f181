"""Results that wait for files: a save is committed once its files are where readers find them.

They are written by a thread, and the train loop goes on meanwhile. Other runs are not concerned. The save's own run may
go on with passes and steps, which a save does not change; their results are held behind the save's, and all are
committed together, in order, so that a position in the database never passes an operation that is not done. The run's
next save, load or creation waits until then. What is held dies with its slot: the log still has all of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import wait

from app.runs.log import Ready
from workers.train.effects import Effect
from workers.train.planner import is_control
from workers.train.results import may_pass
from workers.train.slots import Slot

MOST_HELD = 64
"""So many results of a run are held at most; the rest of its operations wait."""


def position(slot: Slot) -> int:
    """The last operation that has taken effect on the state in memory."""
    return slot.held[-1].operation.seq_id if slot.held else slot.applied_seq


def may_go_ahead(slot: Slot, operations: Sequence[Ready]) -> Sequence[Ready]:
    """Those of a run's next operations that need not wait for its files."""
    if not slot.held:
        return operations
    if slot.crashes:
        return ()
    end = next((i for i, operation in enumerate(operations) if is_control(operation)), len(operations))
    return operations[: min(end, max(0, MOST_HELD - len(slot.held)))]


def hold(effects: Iterable[Effect], slots: Mapping[str, Slot]) -> list[Effect]:
    """Keep the effects that have to wait; returns the others, in order."""
    free = []
    for effect in effects:
        slot = slots[effect.operation.model_id]
        if effect.write is None and not slot.held:
            free.append(effect)
        else:
            slot.held.append(effect)
            slot.last_used = time.monotonic()
    return free


def take_written(slots: Mapping[str, Slot]) -> list[Effect]:
    """The effects that need not wait any more, because their files are written or cannot be. Raises what says that the
    database is away; then nothing is taken, and the slots must be dropped."""
    written = [slot for slot in slots.values() if slot.held and _is_written(slot.held[0])]
    for slot in written:
        _settle(slot.held[0], slot)
    taken = []
    for slot in written:
        taken += slot.held
        slot.held = []
    return taken


def wait_for_files(slots: Mapping[str, Slot], timeout_s: float) -> None:
    """Wait until all files are written, but no longer."""
    writes = [effect.write for slot in slots.values() for effect in slot.held if effect.write is not None]
    wait(writes, timeout_s)


def _is_written(effect: Effect) -> bool:
    return effect.write is None or effect.write.done()


def _settle(effect: Effect, slot: Slot) -> None:
    """A save whose files could not be written has failed, and nothing may name them."""
    error = effect.write.exception() if effect.write is not None else None
    if error is None:
        return
    if not isinstance(error, Exception) or may_pass(error):
        raise error
    effect.fail(error)
    effect.result = None
    effect.rows, effect.run_values, effect.usage, effect.then = [], {}, {}, []
    slot.saved_adapter, slot.saved_version = None, -1
