"""Executes planned operations on slots: what each kind does to a run's state, and what its client gets.

Nothing here commits. An operation yields an `Effect`: its outcome, and the rows that have to be written in the same
transaction as the run's new position. Replay uses the same functions and throws the outcomes away.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from app.errors import InvalidRequest, StorageUnavailable
from app.runs.log import FAILED, MISSING, Failure, NewerRelease, Ready
from app.runs.loss_specs import CUSTOM
from app.runs.pinning import GRAPH_KEY
from app.wire.training import decode_forward_backward, encode_output, parse_forward_backward
from app.wire.types import ForwardBackwardOutput
from workers.model.custom_loss import compile_loss
from workers.model.engine import Engine
from workers.model.forward import Work
from workers.model.optim import fresh_state
from workers.train import snapshots, steps
from workers.train.effects import Bodies, Effect, state_of
from workers.train.planner import MAX_CRASHES, STEP_KIND
from workers.train.results import may_pass
from workers.train.saves import Saver
from workers.train.shared import NotStoredYet, SnapshotReader
from workers.train.slots import RunState, Slot


class Executor:
    """Applies operations with one engine and one store of snapshots."""

    def __init__(self, engine: Engine, saver: Saver, reader: SnapshotReader) -> None:
        self._engine = engine
        self._base = engine.base
        self._reader = reader
        self._saver = saver

    # -- forward and backward

    def forward(self, operations: Sequence[Ready], slots: Mapping[str, Slot], bodies: Bodies) -> list[Effect]:
        """One pass over all `operations`; those that failed on arrival are consumed."""
        effects = [Effect(operation) for operation in operations]
        works: list[tuple[Effect, Work]] = []
        for effect in effects:
            operation = effect.operation
            if operation.state == FAILED:
                continue
            try:
                works.append((effect, self._work(operation, slots[operation.model_id], bodies)))
            except Exception as error:
                effect.fail(error)
        outcomes, pass_id = self._engine.run_pass([work for _, work in works]), time.time_ns()
        for (effect, work), outcome in zip(works, outcomes, strict=True):
            if isinstance(outcome, ForwardBackwardOutput):
                effect.result, effect.result_kind = encode_output(outcome), "proto"
                effect.usage["training"] = effect.operation.tokens
                effect.pass_id = pass_id
                if work.backward:
                    counters = state_of(slots[effect.operation.model_id]).counters
                    counters.summed += 1
                    counters.tokens += effect.operation.tokens
            else:
                effect.fail(outcome)
        for effect in effects:
            if effect.failure is not None or effect.operation.state == FAILED:
                consume_failed(effect.operation, slots[effect.operation.model_id])
        return effects

    def _work(self, operation: Ready, slot: Slot, bodies: Bodies) -> Work:
        request = decode_forward_backward(parse_forward_backward(bodies[operation.model_id, operation.seq_id]))
        config = dict(request.loss_config)
        custom = compile_loss(str(config.pop(GRAPH_KEY))) if request.loss_fn == CUSTOM else None
        return Work(
            adapter=state_of(slot).adapter,
            data=request.data,
            loss_fn=request.loss_fn,
            loss_config=config,
            backward=not request.forward_only,
            custom=custom,
        )

    # -- optimizer steps

    def step(self, operations: Sequence[Ready], slots: Mapping[str, Slot], bodies: Bodies) -> list[Effect]:
        """Optimizer steps; one of each run goes into one fused step."""
        return steps.step(self._engine, operations, slots, bodies)

    # -- control

    def control(self, operation: Ready, slot: Slot, bodies: Bodies, *, replay: bool = False) -> Effect:
        """A creation, a load or a save. In a replay saves do nothing: they change no state.

        Raises NewerRelease for a load of what only a newer release can read, and what says that the database is away,
        or in a replay the store: then the run is as it was, and the operation can be done again.
        """
        effect = Effect(operation)
        body: dict[str, Any] = orjson.loads(bodies[operation.model_id, operation.seq_id] or b"{}")
        try:
            if operation.kind == "create_model":
                self._create(effect, slot)
            elif operation.kind == "load_weights":
                self._load(effect, slot, body)
            elif operation.kind == "save_weights" and not replay:
                self._saver.save(effect, slot, body)
            elif operation.kind == "save_weights_for_sampler" and not replay:
                self._saver.save_for_sampler(effect, slot, body)
            elif operation.kind == "save_weights_external" and not replay:
                self._saver.save_external(effect, slot, body)
        except NewerRelease:
            raise
        except Exception as error:
            if may_pass(error) or (replay and isinstance(error, StorageUnavailable | NotStoredYet)):
                raise
            effect.fail(error)
            if operation.seq_id == 0:
                effect.run_values["failed"] = True
        return effect

    def _create(self, effect: Effect, slot: Slot) -> None:
        adapter = self._base.new_adapter(slot.lora)
        slot.state = RunState(adapter, fresh_state(slot.optimizer_kind, adapter))
        effect.result = orjson.dumps({"model_id": slot.run.id, "type": "create_model"})

    def _load(self, effect: Effect, slot: Slot, body: dict[str, Any]) -> None:
        kind = slot.optimizer_kind
        files = self._reader.read(body["snapshot_id"])
        state = snapshots.state_of_files(files, self._base, kind, optimizer=body["optimizer"])
        if state.adapter.config.rank != slot.run.lora_rank:
            raise InvalidRequest(f"path: the checkpoint has rank {state.adapter.config.rank}, not {slot.run.lora_rank}")
        state.counters.version = slot.state.counters.version + 1 if slot.state else 0
        slot.state = state
        result = {"model_id": slot.run.id, "path": body.get("path"), "type": "load_weights"}
        effect.result = orjson.dumps({key: value for key, value in result.items() if value is not None})


def consume_failed(operation: Ready, slot: Slot) -> None:
    """What a failed operation does to its run: a forward_backward is counted, a step takes its gradient with it.

    A step that failed on arrival, which therefore has no body, never saw the gradient and leaves it.
    """
    if (state := slot.state) is None:
        return
    if operation.kind in ("forward_backward", MISSING):
        state.counters.failed.append(operation.seq_id)
    elif operation.kind == STEP_KIND and operation.body_bytes:
        state.counters.clear_gradient()
        state.adapter.zero_grad()


def give_up(operation: Ready, slot: Slot) -> Effect:
    """Fail an operation that could not be finished by whoever began it."""
    consume_failed(operation, slot)
    reason = f"given up, since all {MAX_CRASHES} attempts ended in the death of their worker or in an error of it"
    message = f"{operation.kind}: {reason}"
    effect = Effect(operation, failure=Failure(message, "server"))
    if operation.seq_id == 0:
        effect.run_values["failed"] = True
    return effect
