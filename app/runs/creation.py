"""Creating runs, of a base model or of a checkpoint, and saying what they are."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import orjson
from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from app.accounts.key_ring import KeyRing
from app.checkpoints import service as checkpoints
from app.checkpoints.access import reader_of
from app.db import Database
from app.errors import ConflictingReplay, InvalidRequest, NotFound
from app.fleet.service import ServedModel, find_model
from app.runs import log
from app.runs.log import Failure, Payload
from app.runs.models import Run, holder
from app.runs.requests import Submitted, fingerprint, readable, validate
from app.runs.schemas import CreateFromWeights, CreateModel, Info, ModelData, OptimizerConfig
from app.sessions.service import require_live
from app.settings import Settings
from app.telemetry.context import note


class RunCreation:
    """The runs that clients of one API process create."""

    def __init__(self, database: Database, settings: Settings, keys: KeyRing) -> None:
        self._database = database
        self._settings = settings
        self._keys = keys

    def create(self, owner_id: str, data: object) -> Submitted:
        """`create_model`: the run's row and operation 0."""
        return self._create(owner_id, data, "create_model", self._plan_create)

    def create_from_weights(self, owner_id: str, data: object) -> Submitted:
        """`load_weights` without a `model_id`: a run that begins as a checkpoint."""
        return self._create(owner_id, data, "load_weights", self._plan_create_from)

    def _plan_create(self, owner_id: str, data: dict[str, Any], run: Run) -> bytes:
        request = validate(CreateModel, data)
        lora = request.lora_config
        run.base_model = request.base_model
        run.user_metadata = request.user_metadata
        if lora is None:
            raise InvalidRequest("lora_config: missing; full fine-tuning is not supported, only LoRA")
        if lora.rank > self._settings.max_lora_rank:
            raise InvalidRequest(f"lora_config.rank: {lora.rank} exceeds the limit of {self._settings.max_lora_rank}")
        run.optimizer = request.optimizer_config.stored()
        run.lora_rank, run.lora_alpha = lora.rank, self._settings.lora_alpha
        run.lora_seed = lora.seed if lora.seed is not None else secrets.randbits(62)
        run.train_attn, run.train_mlp, run.train_unembed = lora.train_attn, lora.train_mlp, lora.train_unembed
        run.pool = self._model(request.base_model, "base_model").pool
        return b"{}"

    def _plan_create_from(self, owner_id: str, data: dict[str, Any], run: Run) -> bytes:
        request = validate(CreateFromWeights, data)
        run.user_metadata = request.user_metadata
        reader = reader_of(self._keys, owner_id, request.weights_access_token)
        with self._database.read() as session:
            found = checkpoints.resolve(session, reader.owner_id, request.path, field=reader.field("path"))
        check_loadable(found, request.optimizer)
        source = found.run
        model = self._model(request.base_model or source.base_model, "base_model")
        if model.pool != source.pool:
            raise InvalidRequest(f"base_model: the checkpoint is of {source.base_model!r}, not {request.base_model!r}")
        run.optimizer = _optimizer_of(request, source)
        run.base_model, run.pool = request.base_model or source.base_model, source.pool
        run.lora_rank, run.lora_alpha, run.lora_seed = source.lora_rank, source.lora_alpha, source.lora_seed
        run.train_attn, run.train_mlp, run.train_unembed = source.train_attn, source.train_mlp, source.train_unembed
        return orjson.dumps({"snapshot_id": found.snapshot.id, "optimizer": request.optimizer})

    def _create(
        self, owner_id: str, data: object, kind: str, plan: Callable[[str, dict[str, Any], Run], bytes]
    ) -> Submitted:
        session_id, model_seq_id = readable(data, "session_id", "model_seq_id", 0)
        assert isinstance(data, dict)
        model_id = f"{session_id}:train:{model_seq_id}"
        note(model_id=model_id, request_id=log.request_id_of(model_id, 0))
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
            try:
                added = log.append(
                    session,
                    model_id=run.id,
                    seq_id=0,
                    kind=kind,
                    fingerprint=mark,
                    body=Payload(body, None, len(body)),
                    failure=failure,
                )
            except ConflictingReplay as error:
                raise ConflictingReplay(f"model_seq_id: {run.model_seq_id} was already used for another run") from error
            worker_id = session.scalar(select(holder()).where(Run.id == run.id)) if known else None
            will_finish = added and failure is None
            return Submitted(log.request_id_of(run.id, 0), run.id, kind, (known or run).pool, worker_id, will_finish)

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

    def _model(self, name: str, field: str) -> ServedModel:
        with self._database.read() as session:
            model = find_model(session, name)
        if model is None:
            raise InvalidRequest(f"{field}: no worker serves {name!r}; `get_server_capabilities` lists what is served")
        return model


def _optimizer_of(request: CreateFromWeights, source: Run) -> dict[str, Any]:
    """The checkpoint's with its state, else the one that is asked for, else AdamW. Raises InvalidRequest."""
    asked = request.optimizer_config
    if not request.optimizer:
        return (asked or OptimizerConfig()).stored()
    if asked is not None and asked.stored() != source.optimizer:
        raise InvalidRequest(
            f"optimizer_config: the checkpoint's optimizer is {source.optimizer['type']}, not {asked.type}; "
            "another begins with optimizer=false"
        )
    return source.optimizer


def check_loadable(found: checkpoints.Resolved, optimizer: bool) -> None:
    """Raise InvalidRequest if the checkpoint lacks the optimizer state that is asked for."""
    if optimizer and found.snapshot.kind != "state":
        raise InvalidRequest(
            "optimizer: a sampler or imported checkpoint has no optimizer state; load it with optimizer=false"
        )
