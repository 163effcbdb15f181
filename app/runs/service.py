"""Accepting training requests: whose run it is, whether the request makes sense, and its place in the log.

Once a run's owner and the request's `(model_id, seq_id)` are known, nothing is refused any more: bad input becomes a
failed operation that takes its place in the sequence, because the client has counted it (WIRE §0.12).
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from app.checkpoints import service as checkpoints
from app.db import Database
from app.errors import InvalidRequest, NotFound
from app.fleet.service import ServedModel, find_model
from app.runs import log
from app.runs.checks import Limits, check_batch
from app.runs.log import Failure, Payload
from app.runs.models import Run
from app.runs.schemas import (
    CreateFromWeights,
    CreateModel,
    Info,
    LoadWeights,
    ModelData,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
)
from app.sessions.service import require_live, require_live_run
from app.settings import Settings
from app.storage.blobs import BlobStore
from app.wire import tinker_pb2 as pb
from app.wire.training import decode_forward_backward, fingerprint_forward_backward

Schema = TypeVar("Schema", bound=BaseModel)
_CACHED_RUNS = 4096


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted request, and whom to ring for it. `pool` None: nobody. `will_finish`: a worker will announce its end;
    false for what has failed already, and for a repeat, which may be done.
    """

    request_id: str
    model_id: str
    kind: str
    pool: str | None
    worker_id: str | None
    will_finish: bool


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What of a run never changes after its creation."""

    owner_id: str
    model: ServedModel | None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked request as the log keeps it."""

    body: bytes
    tokens: int = 0


def validate(schema: type[Schema], data: object) -> Schema:
    """Parse a JSON body. Raises InvalidRequest that names the first wrong field and counts the others."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        where = ".".join(str(part) for part in errors[0]["loc"]) or "body"
        message = errors[0]["msg"].removeprefix("Value error, ")
        if errors[0]["type"] == "extra_forbidden":
            message = "unknown field"
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise InvalidRequest(f"{where}: {message}{more}") from error


def fingerprint(data: dict[str, Any], *, without: tuple[str, ...] = ()) -> str:
    """SHA-256 over the decoded fields of a JSON request, whatever their order. Raises InvalidRequest."""
    kept = {key: value for key, value in data.items() if key not in without and value is not None}
    try:
        return hashlib.sha256(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)).hexdigest()
    except orjson.JSONEncodeError as error:
        raise InvalidRequest("body: its values are nested too deeply") from error


def _readable(data: object, text: str, number: str, least: int) -> tuple[str, int]:
    """The two fields that give a request its place in a sequence. Raises InvalidRequest if they cannot be read."""
    if not isinstance(data, dict):
        raise InvalidRequest("body: must be a JSON object")
    owner, seq = data.get(text), data.get(number)
    if not isinstance(owner, str) or not owner or len(owner) > 200 or "/" in owner:
        raise InvalidRequest(f"{text}: missing or not an id")
    if not isinstance(seq, int) or isinstance(seq, bool) or not least <= seq < 2**31:
        raise InvalidRequest(f"{number}: must be an integer of at least {least}")
    return owner, seq


class RunService:
    """Training requests of one API process."""

    def __init__(self, database: Database, blobs: BlobStore, settings: Settings) -> None:
        self._database = database
        self._blobs = blobs
        self._settings = settings
        self._facts: dict[str, RunFacts] = {}
        self._lock = threading.Lock()

    # -- runs

    def create(self, owner_id: str, data: object) -> Submitted:
        """`create_model`: the run's row and operation 0."""
        return self._create(owner_id, data, "create_model", self._plan_create)

    def _plan_create(self, owner_id: str, data: dict[str, Any], run: Run) -> bytes:
        request = validate(CreateModel, data)
        lora = request.lora_config
        run.base_model = request.base_model
        run.user_metadata = request.user_metadata
        if lora is None:
            raise InvalidRequest("lora_config: missing; full fine-tuning is not supported, only LoRA")
        if lora.rank > self._settings.max_lora_rank:
            raise InvalidRequest(f"lora_config.rank: {lora.rank} exceeds the limit of {self._settings.max_lora_rank}")
        run.optimizer = request.optimizer_config.model_dump()
        run.lora_rank, run.lora_alpha = lora.rank, self._settings.lora_alpha
        run.lora_seed = lora.seed if lora.seed is not None else secrets.randbits(62)
        run.train_attn, run.train_mlp, run.train_unembed = lora.train_attn, lora.train_mlp, lora.train_unembed
        run.pool = self._model(request.base_model, "base_model").pool
        return b"{}"

    def _plan_create_from(self, owner_id: str, data: dict[str, Any], run: Run) -> bytes:
        request = validate(CreateFromWeights, data)
        run.user_metadata = request.user_metadata
        with self._database.read() as session:
            found = checkpoints.resolve(session, owner_id, request.path, field="path")
        self._check_loadable(found, request.optimizer)
        source = found.run
        model = self._model(request.base_model or source.base_model, "base_model")
        if model.pool != source.pool:
            raise InvalidRequest(f"base_model: the checkpoint is of {source.base_model!r}, not {request.base_model!r}")
        optimizer = None if request.optimizer or request.optimizer_config is None else request.optimizer_config
        run.base_model, run.pool = request.base_model or source.base_model, source.pool
        run.lora_rank, run.lora_alpha, run.lora_seed = source.lora_rank, source.lora_alpha, source.lora_seed
        run.train_attn, run.train_mlp, run.train_unembed = source.train_attn, source.train_mlp, source.train_unembed
        run.optimizer = optimizer.model_dump() if optimizer else source.optimizer
        return orjson.dumps({"snapshot_id": found.snapshot.id, "optimizer": request.optimizer})

    def _create(
        self, owner_id: str, data: object, kind: str, plan: Callable[[str, dict[str, Any], Run], bytes]
    ) -> Submitted:
        session_id, model_seq_id = _readable(data, "session_id", "model_seq_id", 0)
        assert isinstance(data, dict)
        model_id = f"{session_id}:train:{model_seq_id}"
        mark = fingerprint(data)
        run = Run(
            id=model_id,
            owner_id=owner_id,
            session_id=session_id,
            model_seq_id=model_seq_id,
            base_model="",
            lora_rank=0,
            lora_alpha=self._settings.lora_alpha,
            lora_seed=0,
            optimizer={},
        )
        body, failure = b"", None
        try:
            body = plan(owner_id, data, run)
        except (InvalidRequest, NotFound) as error:
            failure = Failure(error.detail, error.category)
            run.failed, run.applied_seq, run.pool = True, 0, None
        try:
            return self._append_creation(run, kind, mark, body, failure)
        except IntegrityError:  # the same request came twice at once; the other one is in the log now
            return self._append_creation(run, kind, mark, body, failure)

    def _append_creation(self, run: Run, kind: str, mark: str, body: bytes, failure: Failure | None) -> Submitted:
        with self._database.write() as session:
            require_live(session, run.owner_id, run.session_id)
            known = session.get(Run, run.id)
            if known is None:
                session.add(run)
                session.flush()
            added = log.append(
                session,
                model_id=run.id,
                seq_id=0,
                kind=kind,
                fingerprint=mark,
                body=Payload(body, None, len(body)),
                failure=failure,
            )
            current = known or run
            will_finish = added and failure is None
            return Submitted(log.request_id_of(run.id, 0), run.id, kind, current.pool, current.worker_id, will_finish)

    def info(self, owner_id: str, model_id: str) -> Info:
        """`get_info`. Raises NotFound."""
        with self._database.read() as session:
            run = session.scalar(select(Run).where(Run.id == model_id, Run.owner_id == owner_id))
            model = find_model(session, run.base_model) if run else None
        if run is None:
            raise NotFound(f"model_id: there is no run {model_id!r}")
        name = model.client_name if model else run.base_model
        data = ModelData(
            arch=model.architecture if model else "",
            model_name=name,
            tokenizer_id=model.tokenizer_id if model else None,
        )
        return Info(
            model_id=model_id, model_data=data, optimizer_config=run.optimizer, lora_rank=run.lora_rank, model_name=name
        )

    # -- operations

    def forward_backward(self, owner_id: str, message: pb.ForwardBackwardRequest) -> Submitted:
        """`forward_backward` and `forward`."""

        def prepare(facts: RunFacts) -> Prepared:
            request = decode_forward_backward(message)
            assert facts.model is not None
            limits = Limits(facts.model.vocab_size, facts.model.context_length)
            check_batch(request.loss_fn, request.loss_config, request.data, limits)
            return Prepared(message.SerializeToString(), request.tokens)

        mark = fingerprint_forward_backward(message)
        kind = "forward" if message.forward_only else "forward_backward"
        return self._submit(owner_id, message.model_id, message.seq_id, kind, mark, prepare)

    def optim_step(self, owner_id: str, data: object) -> Submitted:
        """`optim_step`."""
        return self._submit_json(owner_id, data, "optim_step", self._plan_step)

    def _plan_step(self, owner_id: str, data: dict[str, Any]) -> dict[str, Any]:
        if "optimizer_params" in data:
            raise InvalidRequest("optimizer_params: this run's optimizer is adamw; send adam_params")
        return validate(OptimStep, data).adam_params.model_dump()

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

    def load_weights(self, owner_id: str, data: object) -> Submitted:
        """`load_weights`, in place or as a new run, whichever the fields say."""
        if isinstance(data, dict) and "model_id" not in data:
            return self._create(owner_id, data, "load_weights", self._plan_create_from)
        return self._submit_json(owner_id, data, "load_weights", self._plan_load)

    def _plan_load(self, owner_id: str, data: dict[str, Any]) -> dict[str, Any]:
        request = validate(LoadWeights, data)
        with self._database.read() as session:
            found = checkpoints.resolve(session, owner_id, request.path, field="path")
            run = session.get_one(Run, request.model_id)
        self._check_loadable(found, request.optimizer)
        source = found.run
        if source.pool != run.pool:
            raise InvalidRequest(f"path: the checkpoint is of {source.base_model!r}, the run of {run.base_model!r}")
        for field in ("lora_rank", "train_attn", "train_mlp", "train_unembed"):
            if getattr(source, field) != getattr(run, field):
                raise InvalidRequest(
                    f"path: the checkpoint has {field} {getattr(source, field)}, the run {getattr(run, field)}"
                )
        return {"snapshot_id": found.snapshot.id, "optimizer": request.optimizer, "path": request.path}

    @staticmethod
    def _check_loadable(found: checkpoints.Resolved, optimizer: bool) -> None:
        if optimizer and found.snapshot.kind != "state":
            raise InvalidRequest("optimizer: a sampler checkpoint has no optimizer state; load it with optimizer=false")

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
        model_id, seq_id = _readable(data, "model_id", "seq_id", 1)
        assert isinstance(data, dict)
        fields = data

        def prepare(facts: RunFacts) -> Prepared:
            return Prepared(orjson.dumps(plan(owner_id, fields)))

        return self._submit(owner_id, model_id, seq_id, kind, fingerprint(fields, without=without), prepare)

    def _submit(
        self,
        owner_id: str,
        model_id: str,
        seq_id: int,
        kind: str,
        mark: str,
        prepare: Callable[[RunFacts], Prepared],
    ) -> Submitted:
        facts = self._run_facts(owner_id, model_id)
        body, tokens, failure = Payload(b"", None, 0), 0, None
        try:
            if facts.model is None:
                raise InvalidRequest(
                    f"model_id: {model_id!r} takes no operations: its creation failed, or nobody serves its model"
                )
            prepared = prepare(facts)
            tokens = prepared.tokens
            body = Payload.store(prepared.body, self._blobs, folder="bodies", inline_bytes=self._settings.inline_bytes)
        except (InvalidRequest, NotFound) as error:
            failure = Failure(error.detail, error.category)
        try:
            return self._append(owner_id, model_id, seq_id, kind, mark, body, tokens, failure)
        except IntegrityError:  # the same request came twice at once; the other one is in the log now
            return self._append(owner_id, model_id, seq_id, kind, mark, body, tokens, failure)

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
        with self._database.write() as session:
            run = require_live_run(session, owner_id, model_id)
            added = log.append(
                session,
                model_id=model_id,
                seq_id=seq_id,
                kind=kind,
                fingerprint=mark,
                body=body,
                tokens=tokens,
                failure=failure,
            )
        if not added and body.blob is not None:  # a repeat; the first one's body is kept
            self._blobs.delete(body.blob)
        will_finish = added and failure is None
        return Submitted(log.request_id_of(model_id, seq_id), model_id, kind, run.pool, run.worker_id, will_finish)

    def _run_facts(self, owner_id: str, model_id: str) -> RunFacts:
        facts = self._facts.get(model_id)
        if facts is None:
            with self._database.read() as session:
                run = session.get(Run, model_id)
                if run is None or run.owner_id != owner_id:
                    raise NotFound(f"model_id: there is no run {model_id!r}")
                facts = RunFacts(run.owner_id, None if run.failed else find_model(session, run.base_model))
            if facts.model is not None:
                with self._lock:
                    if len(self._facts) >= _CACHED_RUNS:
                        self._facts.clear()
                    self._facts[model_id] = facts
        if facts.owner_id != owner_id:
            raise NotFound(f"model_id: there is no run {model_id!r}")
        return facts

    def _model(self, name: str, field: str) -> ServedModel:
        with self._database.read() as session:
            model = find_model(session, name)
        if model is None:
            raise InvalidRequest(f"{field}: no worker serves {name!r}; `get_server_capabilities` lists what is served")
        return model


def _plan_save(owner_id: str, data: dict[str, Any]) -> dict[str, Any]:
    return validate(SaveWeights, data).model_dump(exclude={"model_id", "seq_id", "type"})


def _plan_save_for_sampler(owner_id: str, data: dict[str, Any]) -> dict[str, Any]:
    return validate(SaveWeightsForSampler, data).model_dump(exclude={"model_id", "seq_id", "type"})
