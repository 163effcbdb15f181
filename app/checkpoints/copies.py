"""Copies of checkpoints: a new name for the same snapshot, held by a run that is never trained.

The copy has a life of its own: nothing that happens to the source changes it. A copy into a project gets a session of
its own, finished from the start, since a run must have one.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.audit import service as audit
from app.checkpoints.access import Reader
from app.checkpoints.quota import NewName, check_quota
from app.checkpoints.schemas import CopyWeights
from app.checkpoints.service import KINDS, Resolved, name_snapshot, resolve, tinker_path
from app.db import Database, utc_now
from app.errors import ConflictingReplay
from app.runs import log
from app.runs.log import Finished, Payload
from app.runs.models import Run
from app.runs.requests import fingerprint
from app.sessions.models import ClientSession
from app.sessions.service import require_live

_KIND = "copy_weights"


@dataclass(frozen=True, slots=True)
class _Place:
    """The run that will hold the copy."""

    session_id: str
    model_seq_id: int

    @property
    def model_id(self) -> str:
        return f"{self.session_id}:train:{self.model_seq_id}"


def copy_weights(
    database: Database,
    owner_id: str,
    request: CopyWeights,
    idempotency_key: str | None,
    reader: Reader,
    *,
    quota_bytes: int = 0,
) -> str:
    """Copy a checkpoint of the reader's, or a published one, for `owner_id`; returns the copy's path. The same
    idempotency key, or the same place in a session, gives the same copy. Raises InvalidRequest (also for what exceeds
    `quota_bytes`, if that is not 0), NotFound, Gone, or ConflictingReplay.
    """
    try:
        with database.write() as session:
            return _copy(session, owner_id, request, idempotency_key, reader, quota_bytes)
    except IntegrityError:  # the same request came twice at once; the other one has made the copy now
        with database.write() as session:
            return _copy(session, owner_id, request, idempotency_key, reader, quota_bytes)


def _copy(
    session: Session,
    owner_id: str,
    request: CopyWeights,
    idempotency_key: str | None,
    reader: Reader,
    quota_bytes: int,
) -> str:
    mark = fingerprint(request.model_dump())
    place = _known_place(session, owner_id, request, idempotency_key)
    if place is not None and (known := log.find(session, place.model_id, 0)) is not None:
        if known.kind != _KIND or known.fingerprint != mark:
            field = "X-Idempotency-Key" if request.session_id is None else "model_seq_id"
            raise ConflictingReplay(f"{field}: {place.model_id!r} was already made by another {known.kind} request")
        kind, name = request.source_path.split("/")[-2:]
        return tinker_path(place.model_id, kind, name)
    source = resolve(session, reader.owner_id, request.source_path, field=reader.field("source_path"), kinds=KINDS)
    if place is None:
        place = _Place(_hold(session, owner_id, request, idempotency_key), 0)
    checkpoint = source.checkpoint
    new = NewName(owner_id, place.model_id, checkpoint.kind, checkpoint.name)
    size_bytes = source.snapshot.size_bytes
    check_quota(
        session, new, snapshot_id=source.snapshot.id, size_bytes=size_bytes, limit=quota_bytes, field="source_path"
    )
    _add_run(session, owner_id, place, source, request.source_path)
    log.append(session, model_id=place.model_id, seq_id=0, kind=_KIND, fingerprint=mark, body=Payload(b"", None, 0))
    log.finish(session, [Finished(place.model_id, 0, Payload(b"{}", None, 2), "json")])
    path = name_snapshot(
        session,
        owner_id=owner_id,
        model_id=place.model_id,
        kind=checkpoint.kind,
        name=checkpoint.name,
        snapshot_id=checkpoint.snapshot_id,
        ttl_seconds=request.ttl_seconds,
        user_metadata=checkpoint.user_metadata,
    )
    details = {"model_id": place.model_id, "tinker_path": path, "source_path": request.source_path}
    audit.record(session, owner_id, "checkpoints", "checkpoint_copy", **details)
    return path


def _known_place(session: Session, owner_id: str, request: CopyWeights, idempotency_key: str | None) -> _Place | None:
    """Where the copy goes, if that is said or was decided by an earlier try."""
    if request.session_id is not None and request.model_seq_id is not None:
        require_live(session, owner_id, request.session_id)
        return _Place(request.session_id, request.model_seq_id)
    if not idempotency_key:
        return None
    query = select(ClientSession.id).where(
        ClientSession.owner_id == owner_id, ClientSession.idempotency_key == _session_key(idempotency_key)
    )
    held = session.scalar(query)
    return _Place(held, 0) if held is not None else None


def _hold(session: Session, owner_id: str, request: CopyWeights, idempotency_key: str | None) -> str:
    """A session for the copy."""
    row = ClientSession(
        id=str(uuid.uuid4()),
        owner_id=owner_id,
        idempotency_key=_session_key(idempotency_key) if idempotency_key else None,
        project_id=request.destination_project_id,
        display_name=f"copy of {request.source_path}"[:200],
        tags=[],
        finish_reason="success",
        finished_at=utc_now(),
    )
    session.add(row)
    session.flush()
    return row.id


def _session_key(idempotency_key: str) -> str:
    return f"copy:{idempotency_key}"


def _add_run(session: Session, owner_id: str, place: _Place, source: Resolved, path: str) -> None:
    origin = source.run
    session.add(
        Run(
            id=place.model_id,
            owner_id=owner_id,
            session_id=place.session_id,
            model_seq_id=place.model_seq_id,
            base_model=origin.base_model,
            pool=origin.pool,
            lora_rank=origin.lora_rank,
            lora_alpha=origin.lora_alpha,
            lora_seed=origin.lora_seed,
            train_attn=origin.train_attn,
            train_mlp=origin.train_mlp,
            train_unembed=origin.train_unembed,
            optimizer=origin.optimizer,
            user_metadata=origin.user_metadata if origin.owner_id == owner_id else None,
            applied_seq=0,
            copied_from=path,
        )
    )
    session.flush()
