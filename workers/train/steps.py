"""Optimizer steps of planned operations (SEMANTICS §5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import orjson

from app.runs.log import FAILED, Failure, Ready
from app.wire.types import AdamParams, DimuonParams
from workers.model.dimuon import DimuonState
from workers.model.engine import Engine
from workers.model.optim import NonFiniteGradient, OptimizerParams
from workers.train.effects import Bodies, Effect, NoState
from workers.train.slots import RunState, Slot


def step(engine: Engine, operations: Sequence[Ready], slots: Mapping[str, Slot], bodies: Bodies) -> list[Effect]:
    """Optimizer steps; one of each run goes into one fused step."""
    effects = {(operation.model_id, operation.seq_id): Effect(operation) for operation in operations}
    left = list(operations)
    while left:
        turn: dict[str, Ready] = {}
        for operation in left:
            turn.setdefault(operation.model_id, operation)
        left = [operation for operation in left if turn[operation.model_id] is not operation]
        _step_each(engine, [effects[o.model_id, o.seq_id] for o in turn.values()], slots, bodies)
    return list(effects.values())


def _step_each(engine: Engine, effects: Sequence[Effect], slots: Mapping[str, Slot], bodies: Bodies) -> None:
    stepping: list[tuple[Effect, RunState, OptimizerParams]] = []
    for effect in effects:
        operation = effect.operation
        if operation.state == FAILED:
            continue
        state = slots[operation.model_id].state
        if state is None:
            effect.fail(NoState())
            continue
        params = _params(bodies[operation.model_id, operation.seq_id])
        if state.counters.summed:
            stepping.append((effect, state, params))
        elif state.counters.failed:
            effect.failure = _all_failed(state.counters.failed)
            state.counters.clear_gradient()
        else:
            effect.result = _step_result(_idle_metrics(state, params), tokens=0, failed=0)
    outcomes = engine.optimizer_step([(state.adapter, state.optimizer, params) for _, state, params in stepping])
    for (effect, state, _), outcome in zip(stepping, outcomes, strict=True):
        counters = state.counters
        if isinstance(outcome, NonFiniteGradient):
            effect.failure = Failure(f"optim_step: {outcome}", "user")
        else:
            effect.result = _step_result(outcome, tokens=counters.tokens, failed=len(counters.failed))
            counters.version += 1
        counters.clear_gradient()


def _params(body: bytes) -> OptimizerParams:
    """AdamW's hyperparameters are bare, those of another optimizer say their `type`."""
    fields = orjson.loads(body)
    return DimuonParams(**fields) if fields.pop("type", None) == DimuonState.kind else AdamParams(**fields)


def _all_failed(seq_ids: Sequence[int]) -> Failure:
    names = ", ".join(str(seq_id) for seq_id in seq_ids[:20])
    return Failure(f"optim_step: every forward_backward since the last step failed (seq_id {names})", "user")


def _step_result(metrics: Mapping[str, float], *, tokens: int, failed: int) -> bytes:
    """The JSON result. JSON has no NaN and the SDK takes no null, so a metric that overflowed is left out."""
    values = {name: value for name, value in metrics.items() if math.isfinite(value)} | {"tokens": float(tokens)}
    if failed:
        values["failed_operations"] = float(failed)
    return orjson.dumps({"metrics": values, "type": "optim_step"})


def _idle_metrics(state: RunState, params: OptimizerParams) -> dict[str, float]:
    weight_norm = float(state.adapter.flat.double().norm())
    return {
        "grad_norm": 0.0,
        "update_norm": 0.0,
        "weight_norm": weight_norm,
        "learning_rate": params.learning_rate,
    }
