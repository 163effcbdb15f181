"""`/v1/models`: the base models that are served, and the caller's newest sampler checkpoints."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.checkpoints.models import Checkpoint
from app.checkpoints.service import SAMPLER, is_live, tinker_path
from app.db import Database
from app.fleet.models import Model, ModelName
from app.fleet.service import roles_by_pool
from app.runs.models import Run
from app.sampling.direct import DirectTarget

MOST_CHECKPOINTS = 100


def list_models(database: Database, owner_id: str) -> list[dict[str, Any]]:
    """What the caller can name as `model`, as far as a list can say it: older and published checkpoints work too."""
    checkpoints = (
        select(Checkpoint, Run.base_model)
        .join(Run, Run.id == Checkpoint.model_id)
        .where(Checkpoint.owner_id == owner_id, Checkpoint.kind == SAMPLER, is_live())
        .order_by(Checkpoint.created_at.desc(), Checkpoint.id.desc())
        .limit(MOST_CHECKPOINTS)
    )
    with database.read() as session:
        listed = _base_models(session)
        for checkpoint, base_model in session.execute(checkpoints):
            path = tinker_path(checkpoint.model_id, checkpoint.kind, checkpoint.name)
            listed.append(_described(path, checkpoint.created_at, root=base_model, parent=base_model))
    return listed


def describe(database: Database, name: str, target: DirectTarget) -> dict[str, Any]:
    """One model that was found."""
    parent = target.model.name if target.snapshot_id is not None else None
    query = select(Model.updated_at).where(Model.pool == target.model.pool)
    with database.read() as session:
        created = session.scalars(query).one()
    return _described(name, created, root=target.model.client_name, parent=parent, context=target.model.context_length)


def _base_models(session: Session) -> list[dict[str, Any]]:
    query = select(ModelName, Model).join(Model, Model.pool == ModelName.pool).order_by(Model.pool, ModelName.position)
    roles = roles_by_pool(session)
    return [
        _described(name.name, model.updated_at, root=name.client_name, context=model.context_length)
        for name, model in session.execute(query)
        if "sample" in roles.get(model.pool, ())
    ]


def _described(
    name: str, created: datetime, *, root: str, parent: str | None = None, context: int | None = None
) -> dict[str, Any]:
    described = {"id": name, "object": "model", "created": int(created.timestamp()), "owned_by": "tinworks"}
    described |= {"root": root, "parent": parent}
    return described if context is None else {**described, "max_model_len": context}
