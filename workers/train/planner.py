"""The planner: which operations one cycle takes, and in which stages. Pure: typed in, typed out, no clock, no I/O.

A cycle has up to three stages, each of many runs at once: optimizer steps that are due, one forward/backward pass, the
optimizer steps right behind it. A run contributes the longest prefix of its queue that fits this order, so no operation
overtakes another of its run. Saves, loads and creations ("control") go alone, before the stages: a run's control
operation is the last that the cycle takes of it.

The pass has a token budget and is shared between tenants (`turns`). Control operations and steps that are due are
always taken, and if the pass behind them would be long, they are a cycle of their own: it comes next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from app.runs.log import FAILED, Ready
from workers.train.turns import Shares, fill_pass

PASS_KINDS = frozenset({"forward", "forward_backward"})
STEP_KIND = "optim_step"
MAX_CRASHES = 3
"""So many workers may die at one operation; then it is failed instead of run."""
NO_SHARES = Shares()
"""Nobody has had more than others."""


@dataclass(frozen=True, slots=True)
class RunQueue:
    """The ready operations of a run, in order. `crashes`: workers that died at the first of them."""

    model_id: str
    owner_id: str
    operations: Sequence[Ready]
    crashes: int = 0


@dataclass(slots=True)
class Plan:
    """What one cycle does, stage by stage. `poisoned` operations are failed without being run. `shares` is for the next
    plan."""

    poisoned: list[Ready] = field(default_factory=list)
    control: list[Ready] = field(default_factory=list)
    steps_before: list[Ready] = field(default_factory=list)
    forward: list[Ready] = field(default_factory=list)
    steps_after: list[Ready] = field(default_factory=list)
    shares: Shares = field(default_factory=Shares)

    @property
    def operations(self) -> list[Ready]:
        """All operations of the plan; those of one run in their order."""
        return self.poisoned + self.control + self.steps_before + self.forward + self.steps_after


def plan(queues: Sequence[RunQueue], *, pass_tokens: int, shares: Shares = NO_SHARES) -> Plan:
    """Plan one cycle over `queues`, which come in the order in which runs should be served: least recently served
    first.

    `pass_tokens`: the budget of a pass. `shares`: those of the plan before; when nobody waits, they begin anew. A run
    at which a worker has died is planned alone, one operation at a time, when its turn comes.
    """
    waiting = [queue for queue in queues if queue.operations]
    if not waiting:
        return Plan()
    result = Plan(shares=shares)
    if waiting[0].crashes:
        _plan_suspect(waiting[0], result)
    else:
        _plan_together([queue for queue in waiting if not queue.crashes], result, pass_tokens)
    return result


def _plan_suspect(queue: RunQueue, result: Plan) -> None:
    first = queue.operations[0]
    if queue.crashes >= MAX_CRASHES and first.state != FAILED:
        result.poisoned.append(first)
    elif first.kind in PASS_KINDS or first.state == FAILED:
        result.forward.append(first)
    elif first.kind == STEP_KIND:
        result.steps_before.append(first)
    else:
        result.control.append(first)


def _plan_together(queues: Sequence[RunQueue], result: Plan, pass_tokens: int) -> None:
    heads = [(queue, _take_head(queue, result)) for queue in queues]
    positions = [(queue, position) for queue, position in heads if position is not None]
    due = {operation.model_id for operation in result.control + result.steps_before}
    result.forward, result.shares = fill_pass(
        [(queue.owner_id, _group(queue, position)) for queue, position in positions],
        budget=pass_tokens,
        shares=result.shares,
        cheap={queue.owner_id for queue in queues if queue.model_id in due},
    )
    taken = Counter(operation.model_id for operation in result.forward)
    for queue, position in positions:
        _take_steps(queue, position + taken[queue.model_id], result.steps_after)


def _group(queue: RunQueue, position: int) -> Sequence[Ready]:
    """The operations from there that may go into one pass."""
    end = position
    while end < len(queue.operations) and _belongs_to_pass(queue.operations[end]):
        end += 1
    return queue.operations[position:end]


def _take_head(queue: RunQueue, result: Plan) -> int | None:
    """Take what comes before the pass. Returns where the run's part of the pass begins; None if it has none."""
    first = queue.operations[0]
    if is_control(first):
        result.control.append(first)
        return None
    return _take_steps(queue, 0, result.steps_before) if first.kind == STEP_KIND else 0


def _take_steps(queue: RunQueue, position: int, stage: list[Ready]) -> int:
    while position < len(queue.operations) and queue.operations[position].kind == STEP_KIND:
        stage.append(queue.operations[position])
        position += 1
    return position


def is_control(operation: Ready) -> bool:
    """Whether an operation is a save, a load or a creation, and not one that has failed on arrival."""
    return operation.state != FAILED and operation.kind != STEP_KIND and operation.kind not in PASS_KINDS


def _belongs_to_pass(operation: Ready) -> bool:
    return operation.kind in PASS_KINDS or (operation.state == FAILED and operation.kind != STEP_KIND)
