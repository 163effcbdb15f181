"""Which runs stay on a train worker and which go: out of slots that others wait for, and to workers that have less to
do. Pure, but for the loads of the others, which the fleet knows.

A slot is for whoever has work. Idle runs leave first, the one that is expected back last before the others; if that is
not enough, runs that always have work leave in turns, each when it has had its share of seconds. A run without a holder
goes to the worker with the fewest queued tokens; a worker that has more to do than another gives up idle runs, which
are claimed there with their next operation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from app.fleet.service import Load
from workers.train.slots import Slot

SOON_S = 60.0
"""A run that is not expected back within this is no load where it is."""
_BOUND_FACTOR = 2
"""Files that are on their way keep a run in its slot for so many slices at most."""


def idle_runs(slots: Iterable[Slot], busy: Collection[str], *, now: float) -> list[Slot]:
    """Those that have no work, the one that is expected back last first, to the second; of equals the least recently
    used. `busy`: ids of runs that have work."""
    idle = (slot for slot in slots if slot.run.id not in busy)
    return sorted(idle, key=lambda slot: (-int(slot.next_use_s(now)), slot.last_used))


def runs_that_had_their_turn(
    slots: Iterable[Slot], busy: Collection[str], *, now: float, slice_s: float, cost_factor: float
) -> list[Slot]:
    """Those that have work and have been in their slot for their share of seconds, longest first: `slice_s`, or
    `cost_factor` times what writing or reading a snapshot of the run takes, if that is more."""
    over = []
    for slot in slots:
        share_s = max(slice_s, cost_factor * slot.snapshot_cost_s, cost_factor * slot.read_s)
        if slot.held:
            share_s *= _BOUND_FACTOR
        if slot.run.id in busy and now - slot.since >= share_s:
            over.append(slot)
    return sorted(over, key=lambda slot: slot.since)


def has_less_to_do(others: Sequence[Load], queued_tokens: int) -> bool:
    """Whether one of the others has fewer queued tokens."""
    return any(other.queued_tokens < queued_tokens for other in others)


def runs_to_give_up(
    slots: Collection[Slot], busy: Collection[str], others: Sequence[Load], *, queued_tokens: int, now: float
) -> list[Slot]:
    """The idle runs that had better be on another worker: as many as make the two hold equally many, if this one has
    more than twice the work of the other. Only those that are expected back soon."""
    if not others:
        return []
    other = min(others, key=lambda load: (load.queued_tokens, load.resident_runs))
    if queued_tokens <= 2 * other.queued_tokens:
        return []
    count = min((len(slots) - other.resident_runs) // 2, other.slots - other.resident_runs)
    soon = [slot for slot in idle_runs(slots, busy, now=now) if slot.next_use_s(now) < SOON_S]
    return soon[: max(0, count)]
