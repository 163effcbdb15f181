"""Slots: the tensors and counters of the runs that are resident in a train worker."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.runs.models import Run
from app.wire.types import LoraConfig
from workers.model.lora import Adapter
from workers.model.optim import OptimizerState
from workers.train.bounds import Lag

if TYPE_CHECKING:
    from workers.train.effects import Effect


@dataclass(slots=True)
class Counters:
    """What a run counts between steps; part of its state.

    `summed`: forward_backward operations in the gradient. `failed`: sequence ids of those that failed. `tokens`: of the
    operations in the gradient. `version`: grows whenever the adapter's weights change.
    """

    summed: int = 0
    failed: list[int] = field(default_factory=list)
    tokens: int = 0
    version: int = 0

    def clear_gradient(self) -> None:
        """Begin the next step's sum."""
        self.summed, self.failed, self.tokens = 0, [], 0


@dataclass(slots=True, eq=False)
class RunState:
    """A run's state at one sequence id: all that a replay would rebuild."""

    adapter: Adapter
    optimizer: OptimizerState
    counters: Counters = field(default_factory=Counters)


@dataclass(slots=True, eq=False)
class Slot:
    """A resident run. `state` is None until operation 0 has made it. `on_trial`: what its row says (`lease.try_`).

    `saved_adapter` is the sampler snapshot of the weights at `saved_version`, shared by saves without a step between.
    `lag`: what was done since the last snapshot was taken; `unwritten`: what was done before that and is not covered by
    one that is durable. `snapshot_cost_s`: seconds that the last one took; `read_s`: those that reading one took, when
    the run came. `held`: see the module of that name. `since`: when it came; `last_used`: when its last work was done
    (monotonic seconds); `pause_s`: how long it usually has none.
    """

    run: Run
    epoch: int
    applied_seq: int
    crashes: int = 0
    on_trial: bool = False
    state: RunState | None = None
    saved_version: int = -1
    saved_adapter: str | None = None
    recovery_snapshot_id: str | None = None
    recovery_seq: int = -1
    lag: Lag = field(default_factory=Lag)
    unwritten: Lag = field(default_factory=Lag)
    snapshot_pending: bool = False
    snapshot_cost_s: float = 0.0
    read_s: float = 0.0
    held: list[Effect] = field(default_factory=list)
    since: float = field(default_factory=time.monotonic)
    last_used: float = field(default_factory=time.monotonic)
    pause_s: float | None = None

    def note_work(self, began: float) -> None:
        """Work that began then is done."""
        if began > self.last_used:
            pause_s = began - self.last_used
            self.pause_s = pause_s if self.pause_s is None else (self.pause_s + pause_s) / 2
        self.last_used = time.monotonic()

    def next_use_s(self, now: float) -> float:
        """In how many seconds an idle run is expected to have work: when its usual pause is over. One that is overdue,
        or of which nothing is known, is expected to be idle for as long again as it has been."""
        idle_s = now - self.last_used
        return self.pause_s - idle_s if self.pause_s is not None and idle_s < self.pause_s else idle_s

    @property
    def to_repeat(self) -> Lag:
        """What a recovery would repeat if the worker died now."""
        return self.lag + self.unwritten

    @property
    def optimizer_kind(self) -> str:
        """The optimizer that the run was created with."""
        kind: str = self.run.optimizer["type"]
        return kind

    @property
    def lora(self) -> LoraConfig:
        """The adapter that the run was created with."""
        run = self.run
        return LoraConfig(
            rank=run.lora_rank,
            seed=run.lora_seed,
            train_attn=run.train_attn,
            train_mlp=run.train_mlp,
            train_unembed=run.train_unembed,
            alpha=run.lora_alpha,
        )
