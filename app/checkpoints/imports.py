"""Imported adapters: checkpoints of a run that is never trained, in a session of its own, finished from the start.

`tinker://<session>:train:0/weights/<name>` and `…/sampler_weights/<name>` are the same snapshot: trainers and samplers
take either. There is no optimizer state in it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from app.accounts.models import Owner
from app.audit import service as audit
from app.checkpoints.quota import NewName, check_quota
from app.checkpoints.service import SAMPLER, TRAINING, add_snapshot, name_snapshot
from app.db import Database, utc_now
from app.errors import InvalidRequest, NotFound
from app.fleet.models import Model
from app.fleet.service import find_model
from app.runs import log
from app.runs.log import Finished, Payload
from app.runs.models import Run
from app.sessions.models import ClientSession
from app.wire.types import LoraConfig

_KIND = "import_weights"
_OPTIMIZER = {"type": "adamw"}


@dataclass(frozen=True, slots=True)
class Imported:
    """What is imported. `source`: where it came from. `snapshot_id`: its files are in the blob store."""

    owner_id: str
    name: str
    base_model: str
    pool: str
    lora: LoraConfig
    source: str
    snapshot_id: str
    size_bytes: int


def find_base(database: Database, name: str) -> tuple[str, str]:
    """Pool and source of the base model that clients call `name`. Raises InvalidRequest."""
    with database.read() as session:
        served = find_model(session, name)
        if served is None:
            raise InvalidRequest(f"--base-model: no worker has registered {name!r}")
        return served.pool, session.get_one(Model, served.pool).source


def find_owner(database: Database, name: str | None) -> str:
    """The id of the tenant of this name or id; without one, of the only tenant. Raises InvalidRequest or NotFound."""
    with database.read() as session:
        query = select(Owner.id).limit(2)
        if name is not None:
            query = query.where(or_(Owner.name == name, Owner.id == name))
        owners = session.scalars(query).all()
    if len(owners) == 1:
        return owners[0]
    if name is not None:
        raise NotFound(f"--owner: there is no tenant {name!r}; `tinworks keys create` makes one")
    raise InvalidRequest("--owner or --key: say whose checkpoint it shall be")


def add_imported(database: Database, imported: Imported, *, quota_bytes: int) -> list[str]:
    """The rows of a checkpoint whose files are stored, all in one transaction. Returns its paths, that for training
    first. Raises InvalidRequest for what exceeds `quota_bytes`, if that is not 0."""
    with database.write() as session:
        run = _add_run(session, imported)
        new = NewName(imported.owner_id, run.id, TRAINING, imported.name)
        check_quota(
            session,
            new,
            snapshot_id=imported.snapshot_id,
            size_bytes=imported.size_bytes,
            limit=quota_bytes,
            field="SOURCE",
        )
        add_snapshot(
            session,
            snapshot_id=imported.snapshot_id,
            owner_id=imported.owner_id,
            model_id=run.id,
            seq_id=0,
            kind="adapter",
            size_bytes=imported.size_bytes,
        )
        paths = [_name(session, imported, run, kind) for kind in (TRAINING, SAMPLER)]
        for path in paths:
            details = {"model_id": run.id, "tinker_path": path, "source": imported.source}
            audit.record(session, imported.owner_id, "checkpoints", "checkpoint_import", **details)
    return paths


def _name(session: Session, imported: Imported, run: Run, kind: str) -> str:
    return name_snapshot(
        session,
        owner_id=imported.owner_id,
        model_id=run.id,
        kind=kind,
        name=imported.name,
        snapshot_id=imported.snapshot_id,
        ttl_seconds=None,
        user_metadata=None,
    )


def _add_run(session: Session, imported: Imported) -> Run:
    place = ClientSession(
        id=str(uuid.uuid4()),
        owner_id=imported.owner_id,
        display_name=f"import of {imported.source}"[:200],
        tags=[],
        finish_reason="success",
        finished_at=utc_now(),
    )
    session.add(place)
    session.flush()
    lora = imported.lora
    run = Run(
        id=f"{place.id}:train:0",
        owner_id=imported.owner_id,
        session_id=place.id,
        model_seq_id=0,
        base_model=imported.base_model,
        pool=imported.pool,
        lora_rank=lora.rank,
        lora_alpha=lora.alpha,
        lora_seed=lora.seed,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
        optimizer=_OPTIMIZER,
        applied_seq=0,
        copied_from=imported.source[:500],
    )
    session.add(run)
    session.flush()
    log.append(session, model_id=run.id, seq_id=0, kind=_KIND, fingerprint="", body=Payload(b"", None, 0))
    log.finish(session, [Finished(run.id, 0, Payload(b"{}", None, 2), "json")])
    return run
