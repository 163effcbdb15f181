"""Accepting training requests: whose run it is, whether the request makes sense, and its place in the log.

Once a run's owner and the request's `(model_id, seq_id)` are known, nothing is refused any more: bad input becomes a
failed operation that takes its place in the sequence, because the client has counted it (WIRE §0.12).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
import structlog
from sqlalchemy.exc import IntegrityError

from app.accounts.key_ring import KeyRing
from app.checkpoints import service as checkpoints
from app.checkpoints.access import reader_of
from app.checkpoints.encryption import parse_recipients
from app.custom_losses import service as custom_losses
from app.db import Database
from app.errors import InvalidRequest, NotFound, TinworksError
from app.fleet.service import ServedModel, find_model
from app.recent import Recent
from app.runs import log
from app.runs.bodies import Body, BodyStore
from app.runs.checks import Limits, check_batch, check_custom_batch
from app.runs.creation import RunCreation, check_loadable
from app.runs.log import Failure, Payload
from app.runs.loss_specs import CUSTOM, LOSS_SPECS
from app.runs.models import Run
from app.runs.pinning import pin_graph, pin_logprobs, sequence_ids
from app.runs.requests import Submitted, fingerprint, readable, validate
from app.runs.schemas import (
    Info,
    LoadWeights,
    OptimStep,
    OtherOptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from app.sampling.records import find_recorded
from app.sessions.service import require_live_run
from app.settings import Settings
from app.storage.blobs import BlobStore
from app.telemetry.context import note
from app.wire import tinker_pb2 as pb
from app.wire.training import (
    canonical_forward_backward,
    decode_forward_backward,
)
from app.wire.training_json import encode_request

logger = structlog.get_logger(__name__)

ADAMW = "adamw"
_REMEMBERED_S = 300.0
"""How long the facts of a run are kept at hand after they were looked up; they never change."""
_NO_BODY = Payload(b"", None, 0)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What of a run never changes after its creation."""

    owner_id: str
    session_id: str
    model: ServedModel | None
    optimizer: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request as the log keeps it."""

    body: bytes | Body
    tokens: int = 0


class RunService:
    """Training requests of one API process."""

    def __init__(self, database: Database, blobs: BlobStore, settings: Settings, keys: KeyRing) -> None:
        self._database = database
        self._blobs = blobs
        self._facts: Recent[str, RunFacts] = Recent(ttl_s=_REMEMBERED_S)
        self._lock = threading.Lock()
        self._keys = keys
        self._bodies = BodyStore(blobs, settings)
        self._creation = RunCreation(database, settings, self._keys)

    def create(self, owner_id: str, data: object) -> Submitted:
        """`create_model`."""
        return self._creation.create(owner_id, data)

    def info(self, owner_id: str, model_id: str) -> Info:
        """`get_info`. Raises NotFound."""
        return self._creation.info(owner_id, model_id)

    # -- operations

    def forward_backward(self, owner_id: str, message: pb.ForwardBackwardRequest) -> Submitted:
        """`forward_backward` and `forward`."""
        self._run_facts(owner_id, message.model_id)  # nothing is stored for a run that is not the owner's
        canonical = canonical_forward_backward(message)
        with self._bodies.begin(canonical) as body:
            kind = "forward" if message.forward_only else "forward_backward"
            prepare = partial(self._prepare_batch, owner_id, message, body)
            return self._submit(owner_id, message.model_id, message.seq_id, kind, body.fingerprint, prepare)

    def _prepare_batch(
        self, owner_id: str, message: pb.ForwardBackwardRequest, body: Body, facts: RunFacts
    ) -> Prepared:
        """The checked request, with what it refers to written into it."""
        request = decode_forward_backward(message)
        assert facts.model is not None
        limits = Limits(facts.model.vocab_size, facts.model.context_length)
        if request.loss_fn == CUSTOM:
            with self._database.read() as session:
                loss = custom_losses.find(session, owner_id, request.loss_config.get("loss_id"))
            check_custom_batch(request.loss_config, request.data, limits, loss.graph)
            return Prepared(pin_graph(message, loss).SerializeToString(), request.tokens)
        check_batch(request.loss_fn, request.loss_config, request.data, limits)
        if not LOSS_SPECS[request.loss_fn].provenance:
            return Prepared(body, request.tokens)
        with self._database.read() as session:
            recorded = find_recorded(
                session,
                owner_id=owner_id,
                session_id=facts.session_id,
                sequence_ids=sequence_ids(request.data),
            )
        return Prepared(pin_logprobs(message, request.data, recorded).SerializeToString(), request.tokens)

    def forward_backward_json(self, owner_id: str, data: object, *, forward_only: bool) -> Submitted:
        """`forward_backward` and `forward` in the form of older SDKs."""
        model_id, seq_id = readable(data, "model_id", "seq_id", 1)
        assert isinstance(data, dict)
        try:
            message = encode_request(data, model_id=model_id, seq_id=seq_id, forward_only=forward_only)
        except InvalidRequest as error:
            kind = "forward" if forward_only else "forward_backward"
            return self._submit(owner_id, model_id, seq_id, kind, partial(fingerprint, data), partial(_refuse, error))
        return self.forward_backward(owner_id, message)

    def optim_step(self, owner_id: str, data: object) -> Submitted:
        """`optim_step`."""
        return self._submit_json(owner_id, data, "optim_step", self._plan_step)

    def _plan_step(self, owner_id: str, data: dict[str, Any]) -> dict[str, Any]:
        """The body: AdamW's hyperparameters bare, those of another optimizer with its `type`."""
        kind = self._run_facts(owner_id, data["model_id"]).optimizer
        own, other = ("adam_params", "optimizer_params") if kind == ADAMW else ("optimizer_params", "adam_params")
        if data.get(other) is not None:
            raise InvalidRequest(f"{other}: this run's optimizer is {kind}; send {own}")
        fields = {name: value for name, value in data.items() if name != other}
        if kind == ADAMW:
            return validate(OptimStep, fields).adam_params.model_dump()
        return validate(OtherOptimStep, fields).optimizer_params.model_dump()

    def save_weights(self, owner_id: str, data: object) -> Submitted:
        """`save_weights`: a named training checkpoint."""
        return self._submit_json(owner_id, data, "save_weights", _plan_save)

    def save_weights_for_sampler(self, owner_id: str, data: object) -> Submitted:
        """`save_weights_for_sampler`: a named or an ephemeral sampler snapshot."""
        return self._submit_json(
            owner_id,
            data,
            "save_weights_for_sampler",
            _plan_save_for_sampler,
            without=("sampling_session_seq_id",),
        )

    def save_weights_external(self, owner_id: str, data: object) -> Submitted:
        """`save_weights_external`: a named export of the weights, to be downloaded."""
        return self._submit_json(owner_id, data, "save_weights_external", _plan_save_external)

    def load_weights(self, owner_id: str, data: object) -> Submitted:
        """`load_weights`, in place or as a new run, whichever the fields say."""
        if isinstance(data, dict) and data.get("model_id") is None:
            return self._creation.create_from_weights(owner_id, data)
        return self._submit_json(owner_id, data, "load_weights", self._plan_load)

    def _plan_load(self, owner_id: str, data: dict[str, Any]) -> dict[str, Any]:
        request = validate(LoadWeights, data)
        reader = reader_of(self._keys, owner_id, request.weights_access_token)
        with self._database.read() as session:
            found = checkpoints.resolve(session, reader.owner_id, request.path, field=reader.field("path"))
            run = session.get_one(Run, request.model_id)
        check_loadable(found, request.optimizer)
        source = found.run
        if request.optimizer and source.optimizer["type"] != run.optimizer["type"]:
            raise InvalidRequest(
                f"optimizer: the checkpoint's optimizer is {source.optimizer['type']}, the run's "
                f"{run.optimizer['type']}; load it with optimizer=false"
            )
        if source.pool != run.pool:
            raise InvalidRequest(f"path: the checkpoint is of {source.base_model!r}, the run of {run.base_model!r}")
        for field in ("lora_rank", "train_attn", "train_mlp", "train_unembed"):
            if getattr(source, field) != getattr(run, field):
                raise InvalidRequest(
                    f"path: the checkpoint has {field} {getattr(source, field)}, the run {getattr(run, field)}"
                )
        return {"snapshot_id": found.snapshot.id, "optimizer": request.optimizer, "path": request.path}

    def unload(self, owner_id: str, model_id: str) -> str:
        """`unload_model`: the run takes no more operations and leaves its worker when it has done those it took.
        Returns the request id. Raises NotFound or Gone."""
        with contextlib.suppress(IntegrityError), self._database.write() as session:  # asked twice at once
            require_live_run(session, owner_id, model_id)
            log.unload(session, model_id)
        return log.request_id_of(model_id, log.UNLOADED_SEQ)

    # -- the common path

    def _submit_json(
        self,
        owner_id: str,
        data: object,
        kind: str,
        plan: Callable[[str, dict[str, Any]], dict[str, Any]],
        *,
        without: tuple[str, ...] = (),
    ) -> Submitted:
        model_id, seq_id = readable(data, "model_id", "seq_id", 1)
        assert isinstance(data, dict)
        fields = data

        def prepare(facts: RunFacts) -> Prepared:
            return Prepared(orjson.dumps(plan(owner_id, fields)))

        mark = fingerprint(fields, without=without)
        return self._submit(owner_id, model_id, seq_id, kind, lambda: mark, prepare)

    def _submit(
        self,
        owner_id: str,
        model_id: str,
        seq_id: int,
        kind: str,
        mark: Callable[[], str],
        prepare: Callable[[RunFacts], Prepared],
    ) -> Submitted:
        note(model_id=model_id, request_id=log.request_id_of(model_id, seq_id))
        facts = self._run_facts(owner_id, model_id)
        body, tokens, failure = _NO_BODY, 0, None
        try:
            if facts.model is None:
                raise InvalidRequest(
                    f"model_id: {model_id!r} takes no operations: its creation failed, it is the copy of a checkpoint, "
                    "or nobody serves its model"
                )
            prepared = prepare(facts)
            tokens = prepared.tokens
            body = prepared.body.payload() if isinstance(prepared.body, Body) else self._bodies.keep(prepared.body)
        except (InvalidRequest, NotFound) as error:
            failure = Failure(error.detail, error.category)
        try:
            return self._append(owner_id, model_id, seq_id, kind, mark(), body, tokens, failure)
        except IntegrityError:  # the same request came twice at once; the other one is in the log now
            return self._append(owner_id, model_id, seq_id, kind, mark(), body, tokens, failure)

    def _append(
        self,
        owner_id: str,
        model_id: str,
        seq_id: int,
        kind: str,
        mark: str,
        body: Payload,
        tokens: int,
        failure: Failure | None,
    ) -> Submitted:
        try:
            with self._database.write() as session:
                run = require_live_run(session, owner_id, model_id)
                if run.unloaded and failure is None:
                    failure = Failure(f"model_id: {model_id!r} was unloaded; it takes no more operations", "user")
                added = log.append(
                    session,
                    model_id=model_id,
                    seq_id=seq_id,
                    kind=kind,
                    fingerprint=mark,
                    body=_NO_BODY if failure else body,
                    tokens=tokens,
                    failure=failure,
                )
        except TinworksError:  # nothing was written
            self._drop(body)
            raise
        if not added or failure:  # a repeat; the first one's body is kept
            self._drop(body)
        will_finish = added and failure is None
        logger.debug("submitted", kind=kind, tokens=tokens, repeated=not added, failed=failure is not None)
        return Submitted(log.request_id_of(model_id, seq_id), model_id, kind, run.pool, run.worker_id, will_finish)

    def _drop(self, body: Payload) -> None:
        if body.blob is not None:
            self._blobs.delete(body.blob)

    def _run_facts(self, owner_id: str, model_id: str) -> RunFacts:
        facts = self._facts.get(model_id)
        if facts is None:
            with self._database.read() as session:
                run = session.get(Run, model_id)
                if run is None or run.owner_id != owner_id:
                    raise NotFound(f"model_id: there is no run {model_id!r}")
                closed = run.failed or run.copied_from is not None
                model = None if closed else find_model(session, run.base_model)
                facts = RunFacts(run.owner_id, run.session_id, model, run.optimizer.get("type", ADAMW))
            if facts.model is not None:
                with self._lock:
                    self._facts.put(model_id, facts)
        if facts.owner_id != owner_id:
            raise NotFound(f"model_id: there is no run {model_id!r}")
        return facts


def _refuse(error: InvalidRequest, facts: RunFacts) -> Prepared:
    raise error


def _plan_save(owner_id: str, data: dict[str, Any]) -> dict[str, Any]:
    return validate(SaveWeights, data).model_dump(exclude={"model_id", "seq_id", "type"})


def _plan_save_for_sampler(owner_id: str, data: dict[str, Any]) -> dict[str, Any]:
    return validate(SaveWeightsForSampler, data).model_dump(exclude={"model_id", "seq_id", "type"})


def _plan_save_external(owner_id: str, data: dict[str, Any]) -> dict[str, Any]:
    request = validate(SaveWeightsExternal, data)
    parse_recipients(request.age_encryption_recipients or [])
    return request.model_dump(exclude={"model_id", "seq_id", "type"})
