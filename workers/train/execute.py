"""Executes planned operations on slots: what each kind does to a run's state, and what its client gets.

Nothing here commits. An operation yields an `Effect`: its outcome, and the rows that have to be written in the same
transaction as the run's new position. Replay uses the same functions and throws the outcomes away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import structlog
from sqlalchemy.orm import Session

from app.audit import service as audit
from app.billing.meter import UsageKind
from app.checkpoints import service as checkpoints
from app.db import Database
from app.errors import InvalidRequest
from app.runs.log import FAILED, MISSING, Failure, Ready
from app.sampling.models import SamplingSession
from app.storage.blobs import BlobStore
from app.wire.training import decode_forward_backward, encode_output, parse_forward_backward
from app.wire.types import AdamParams, ForwardBackwardOutput
from workers.model.base import BaseModel
from workers.model.forward import Work, run_pass
from workers.model.optim import AdamState, NonFiniteGradient, adamw_step
from workers.train import snapshots
from workers.train.planner import STEP_KIND
from workers.train.slots import RunState, Slot
from workers.train.snapshots import BadSnapshot, SnapshotFiles

log = structlog.get_logger(__name__)

Bodies = Mapping[tuple[str, int], bytes]


@dataclass(slots=True)
class Effect:
    """What became of an operation. `rows` are written, `run_values` set, and `usage` is counted in the commit that
    finishes it."""

    operation: Ready
    result: bytes | None = None
    result_kind: str = "json"
    failure: Failure | None = None
    rows: list[Callable[[Session], None]] = field(default_factory=list)
    run_values: dict[str, Any] = field(default_factory=dict)
    usage: dict[UsageKind, int] = field(default_factory=dict)


def _server_failure(operation: Ready, error: Exception) -> Failure:
    log.error("operation_failed", model_id=operation.model_id, seq_id=operation.seq_id, exc_info=error)
    return Failure(f"{operation.kind} failed on the server ({type(error).__name__}); its log has the details", "server")


class Executor:
    """Applies operations with one base model and one blob store."""

    def __init__(self, base: BaseModel, database: Database, blobs: BlobStore, *, micro_batch_tokens: int) -> None:
        self._base = base
        self._database = database
        self._blobs = blobs
        self._micro_batch_tokens = micro_batch_tokens

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
                effect.failure = _failure(operation, error)
        outcomes = run_pass(self._base, [work for _, work in works], micro_batch_tokens=self._micro_batch_tokens)
        for (effect, work), outcome in zip(works, outcomes, strict=True):
            if isinstance(outcome, ForwardBackwardOutput):
                effect.result, effect.result_kind = encode_output(outcome), "proto"
                effect.usage["training"] = effect.operation.tokens
                if work.backward:
                    counters = _state(slots[effect.operation.model_id]).counters
                    counters.summed += 1
                    counters.tokens += effect.operation.tokens
            else:
                effect.failure = _failure(effect.operation, outcome)
        for effect in effects:
            if effect.failure is not None or effect.operation.state == FAILED:
                consume_failed(effect.operation, slots[effect.operation.model_id])
        return effects

    def _work(self, operation: Ready, slot: Slot, bodies: Bodies) -> Work:
        request = decode_forward_backward(parse_forward_backward(bodies[operation.model_id, operation.seq_id]))
        return Work(
            adapter=_state(slot).adapter,
            data=request.data,
            loss_fn=request.loss_fn,
            loss_config=request.loss_config,
            backward=not request.forward_only,
        )

    # -- optimizer steps

    def step(self, operations: Sequence[Ready], slots: Mapping[str, Slot], bodies: Bodies) -> list[Effect]:
        """Optimizer steps; one of each run goes into one fused step."""
        effects = {(operation.model_id, operation.seq_id): Effect(operation) for operation in operations}
        left = list(operations)
        while left:
            turn: dict[str, Ready] = {}
            for operation in left:
                turn.setdefault(operation.model_id, operation)
            left = [operation for operation in left if turn[operation.model_id] is not operation]
            self._step_each([effects[o.model_id, o.seq_id] for o in turn.values()], slots, bodies)
        return list(effects.values())

    def _step_each(self, effects: Sequence[Effect], slots: Mapping[str, Slot], bodies: Bodies) -> None:
        stepping: list[tuple[Effect, RunState, AdamParams]] = []
        for effect in effects:
            operation = effect.operation
            if operation.state == FAILED:
                continue
            state = slots[operation.model_id].state
            if state is None:
                effect.failure = _failure(operation, _NoState())
                continue
            params = AdamParams(**orjson.loads(bodies[operation.model_id, operation.seq_id]))
            if state.counters.summed:
                stepping.append((effect, state, params))
            elif state.counters.failed:
                effect.failure = _all_failed(state.counters.failed)
                state.counters.clear_gradient()
            else:
                effect.result = _step_result(_idle_metrics(state, params), tokens=0, failed=0)
        outcomes = adamw_step([(state.adapter, state.adam, params) for _, state, params in stepping])
        for (effect, state, _), outcome in zip(stepping, outcomes, strict=True):
            counters = state.counters
            if isinstance(outcome, NonFiniteGradient):
                effect.failure = Failure(f"optim_step: {outcome}", "user")
            else:
                effect.result = _step_result(outcome, tokens=counters.tokens, failed=len(counters.failed))
                counters.version += 1
            counters.clear_gradient()

    # -- control

    def control(self, operation: Ready, slot: Slot, bodies: Bodies, *, replay: bool = False) -> Effect:
        """A creation, a load or a save. In a replay saves do nothing: they change no state."""
        effect = Effect(operation)
        body: dict[str, Any] = orjson.loads(bodies[operation.model_id, operation.seq_id] or b"{}")
        try:
            if operation.kind == "create_model":
                self._create(effect, slot)
            elif operation.kind == "load_weights":
                self._load(effect, slot, body)
            elif operation.kind == "save_weights" and not replay:
                self._save(effect, slot, body)
            elif operation.kind == "save_weights_for_sampler" and not replay:
                self._save_for_sampler(effect, slot, body)
        except Exception as error:
            effect.failure = _failure(operation, error)
            if operation.seq_id == 0:
                effect.run_values["failed"] = True
        return effect

    def _create(self, effect: Effect, slot: Slot) -> None:
        adapter = self._base.new_adapter(slot.lora)
        slot.state = RunState(adapter, AdamState.zeros(adapter))
        effect.result = orjson.dumps({"model_id": slot.run.id, "type": "create_model"})

    def _load(self, effect: Effect, slot: Slot, body: dict[str, Any]) -> None:
        state = snapshots.read_state(self._blobs, body["snapshot_id"], self._base, optimizer=body["optimizer"])
        if state.adapter.config.rank != slot.run.lora_rank:
            raise InvalidRequest(f"path: the checkpoint has rank {state.adapter.config.rank}, not {slot.run.lora_rank}")
        state.counters.version = slot.state.counters.version + 1 if slot.state else 0
        slot.state = state
        result = {"model_id": slot.run.id, "path": body.get("path"), "type": "load_weights"}
        effect.result = orjson.dumps({key: value for key, value in result.items() if value is not None})

    def _save(self, effect: Effect, slot: Slot, body: dict[str, Any]) -> None:
        name = self._free_name(slot, checkpoints.TRAINING, body)
        files = snapshots.state_files(_state(slot), self._base, seq_id=effect.operation.seq_id)
        snapshots.write(self._blobs, files)
        effect.rows.append(self._snapshot_row(effect, slot, files))
        _name(effect, slot, checkpoints.TRAINING, body, files.id)
        path = checkpoints.tinker_path(slot.run.id, checkpoints.TRAINING, name)
        effect.result = orjson.dumps({"path": path, "type": "save_weights"})

    def _save_for_sampler(self, effect: Effect, slot: Slot, body: dict[str, Any]) -> None:
        name = self._free_name(slot, checkpoints.SAMPLER, body) if body["path"] is not None else None
        snapshot_id = self._sampler_snapshot(effect, slot)
        effect.run_values["sampler_snapshot_id"] = snapshot_id
        result: dict[str, Any] = {"type": "save_weights_for_sampler"}
        if name is not None:
            _name(effect, slot, checkpoints.SAMPLER, body, snapshot_id)
            result["path"] = checkpoints.tinker_path(slot.run.id, checkpoints.SAMPLER, name)
        else:
            row = _sampling_session(slot, body, snapshot_id)
            effect.rows.append(lambda session: _add_if_new(session, row))
            result["sampling_session_id"] = row.id
        effect.result = orjson.dumps(result)

    def _sampler_snapshot(self, effect: Effect, slot: Slot) -> str:
        """The snapshot of the present weights: a new one, or the one that an earlier save of them made."""
        state = _state(slot)
        if slot.saved_adapter is None or slot.saved_version != state.counters.version:
            files = snapshots.adapter_files(state.adapter, self._base)
            snapshots.write(self._blobs, files)
            effect.rows.append(self._snapshot_row(effect, slot, files))
            slot.saved_adapter, slot.saved_version = files.id, state.counters.version
        return slot.saved_adapter

    def _free_name(self, slot: Slot, kind: str, body: dict[str, Any]) -> str:
        name: str = body["path"]
        with self._database.read() as session:
            taken = checkpoints.exists(session, slot.run.id, kind, name)
        if taken and not body["overwrite"]:
            raise InvalidRequest(f"path: the run has a checkpoint {kind}/{name} already; overwrite=true replaces it")
        return name

    @staticmethod
    def _snapshot_row(effect: Effect, slot: Slot, files: SnapshotFiles) -> Callable[[Session], None]:
        def add(session: Session) -> None:
            checkpoints.add_snapshot(
                session,
                snapshot_id=files.id,
                owner_id=slot.run.owner_id,
                model_id=slot.run.id,
                seq_id=effect.operation.seq_id,
                kind=files.kind,
                size_bytes=files.size_bytes,
            )

        return add


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
    """Fail an operation that brought down whoever ran it."""
    consume_failed(operation, slot)
    message = f"{operation.kind}: every worker that ran this operation died of it, so it was given up"
    effect = Effect(operation, failure=Failure(message, "server"))
    if operation.seq_id == 0:
        effect.run_values["failed"] = True
    return effect


class _NoState(Exception):
    """The run's creation failed on the worker, so there is nothing to operate on."""


def _state(slot: Slot) -> RunState:
    if slot.state is None:
        raise _NoState
    return slot.state


def _failure(operation: Ready, error: Exception) -> Failure:
    if isinstance(error, InvalidRequest):
        return Failure(error.detail, error.category)
    if isinstance(error, BadSnapshot):
        return Failure(f"{operation.kind}: {error}", "user")
    if isinstance(error, _NoState):
        return Failure("model_id: the run takes no operations, since its creation failed", "user")
    return _server_failure(operation, error)


def _all_failed(seq_ids: Sequence[int]) -> Failure:
    names = ", ".join(str(seq_id) for seq_id in seq_ids[:20])
    return Failure(f"optim_step: every forward_backward since the last step failed (seq_id {names})", "user")


def _step_result(metrics: Mapping[str, float], *, tokens: int, failed: int) -> bytes:
    """The JSON result. JSON has no NaN and the SDK takes no null, so a metric that overflowed is left out."""
    values = {name: value for name, value in metrics.items() if math.isfinite(value)} | {"tokens": float(tokens)}
    if failed:
        values["failed_operations"] = float(failed)
    return orjson.dumps({"metrics": values, "type": "optim_step"})


def _idle_metrics(state: RunState, params: AdamParams) -> dict[str, float]:
    weight_norm = float(state.adapter.flat.double().norm())
    return {
        "grad_norm": 0.0,
        "update_norm": 0.0,
        "weight_norm": weight_norm,
        "learning_rate": params.learning_rate,
    }


def _name(effect: Effect, slot: Slot, kind: str, body: dict[str, Any], snapshot_id: str) -> None:
    """A checkpoint comes to be: its name, its entry in the audit log, its count."""
    run, seq_id = slot.run, effect.operation.seq_id

    def write(session: Session) -> None:
        path = checkpoints.name_snapshot(
            session,
            owner_id=run.owner_id,
            model_id=run.id,
            kind=kind,
            name=body["path"],
            snapshot_id=snapshot_id,
            ttl_seconds=body["ttl_seconds"],
            user_metadata=body["user_metadata"],
        )
        details = {"model_id": run.id, "tinker_path": path, "seq_id": seq_id, "ttl_seconds": body["ttl_seconds"]}
        audit.record(session, run.owner_id, "checkpoints", "checkpoint_save", **details)

    effect.rows.append(write)
    effect.usage["checkpoint"] = 1


def _sampling_session(slot: Slot, body: dict[str, Any], snapshot_id: str) -> SamplingSession:
    run, seq_id = slot.run, body["sampling_session_seq_id"]
    assert run.pool is not None
    return SamplingSession(
        id=f"{run.session_id}:sample:{seq_id}",
        owner_id=run.owner_id,
        session_id=run.session_id,
        seq_id=seq_id,
        base_model=run.base_model,
        pool=run.pool,
        snapshot_id=snapshot_id,
        follows_model_id=run.id if body["kind"] == "inflight" else None,
    )


def _add_if_new(session: Session, row: SamplingSession) -> None:
    if session.get(SamplingSession, row.id) is None:
        session.add(row)
