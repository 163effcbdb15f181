"""The catalogue of checkpoints: listed, published, given a life, deleted. One that has expired is not there.

A checkpoint is a name. Deleting or renaming one touches no snapshot: a sampler or a replay that holds the snapshot goes
on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from sqlalchemy import ColumnElement, Select, delete, func, select, update
from sqlalchemy.orm import Session

from app.audit import service as audit
from app.checkpoints.models import Checkpoint, Snapshot
from app.checkpoints.schemas import CheckpointInfo, Checkpoints, WeightsInfo
from app.checkpoints.service import KINDS, is_live, is_readable, resolve, tinker_path
from app.db import Database, utc_now
from app.errors import InvalidRequest, NotFound
from app.paging import Cursor, Page, readable_metadata
from app.runs.models import Run

_TYPES: dict[str, Literal["training", "sampler", "external"]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}


def describe(checkpoint: Checkpoint, size_bytes: int) -> CheckpointInfo:
    """A checkpoint, as lists show it."""
    return CheckpointInfo(
        checkpoint_id=f"{checkpoint.kind}/{checkpoint.name}",
        checkpoint_type=_TYPES[checkpoint.kind],
        time=checkpoint.created_at,
        tinker_path=tinker_path(checkpoint.model_id, checkpoint.kind, checkpoint.name),
        size_bytes=size_bytes,
        public=checkpoint.public,
        user_metadata=readable_metadata(checkpoint.user_metadata),
        expires_at=checkpoint.expires_at,
    )


def _listed() -> Select[Checkpoint, int]:
    return (
        select(Checkpoint, Snapshot.size_bytes)
        .join(Snapshot, Snapshot.id == Checkpoint.snapshot_id)
        .where(is_live())
        .order_by(Checkpoint.created_at.desc(), Checkpoint.id.desc())
    )


def list_of_run(database: Database, owner_id: str, model_id: str) -> Checkpoints:
    """All checkpoints of the owner's run, newest first. Raises NotFound."""
    with database.read() as session:
        if session.scalar(select(Run.id).where(Run.id == model_id, Run.owner_id == owner_id)) is None:
            raise NotFound(f"training_run_id: there is no run {model_id!r}")
        rows = session.execute(_listed().where(Checkpoint.model_id == model_id, Checkpoint.owner_id == owner_id))
        return Checkpoints(checkpoints=[describe(checkpoint, size) for checkpoint, size in rows])


def list_of_owner(database: Database, owner_id: str, page: Page) -> Checkpoints:
    """A page of all checkpoints of an owner, newest first."""
    with database.read() as session:
        query = select(func.count()).select_from(Checkpoint).where(Checkpoint.owner_id == owner_id, is_live())
        total = session.scalar(query) or 0
        rows = session.execute(_listed().where(Checkpoint.owner_id == owner_id).limit(page.limit).offset(page.offset))
        cursor = Cursor(offset=page.offset, limit=page.limit, total_count=total)
        return Checkpoints(checkpoints=[describe(checkpoint, size) for checkpoint, size in rows], cursor=cursor)


def newest(session: Session, owner_id: str, model_ids: Iterable[str]) -> dict[tuple[str, str], CheckpointInfo]:
    """The newest checkpoint of each run and kind that the owner can read."""
    place = func.row_number().over(
        partition_by=(Checkpoint.model_id, Checkpoint.kind),
        order_by=(Checkpoint.created_at.desc(), Checkpoint.id.desc()),
    )
    ranked = (
        select(Checkpoint.id, place.label("place"))
        .where(Checkpoint.model_id.in_(list(model_ids)), is_live(), is_readable(owner_id))
        .subquery()
    )
    query = (
        select(Checkpoint, Snapshot.size_bytes)
        .join(ranked, ranked.c.id == Checkpoint.id)
        .join(Snapshot, Snapshot.id == Checkpoint.snapshot_id)
        .where(ranked.c.place == 1)
    )
    return {(row.model_id, row.kind): describe(row, size) for row, size in session.execute(query)}


def weights_info(database: Database, owner_id: str, path: str) -> WeightsInfo:
    """What the checkpoint is of. Raises InvalidRequest or NotFound."""
    with database.read() as session:
        run = resolve(session, owner_id, path, field="tinker_path", kinds=KINDS).run
    return WeightsInfo(
        base_model=run.base_model,
        lora_rank=run.lora_rank,
        train_unembed=run.train_unembed,
        train_mlp=run.train_mlp,
        train_attn=run.train_attn,
        optimizer_config=run.optimizer,
    )


@dataclass(frozen=True, slots=True)
class Address:
    """The three parts of a checkpoint's path."""

    model_id: str
    kind: str
    name: str

    def __str__(self) -> str:
        return tinker_path(self.model_id, self.kind, self.name)


def publish(database: Database, owner_id: str, address: Address, *, public: bool) -> None:
    """Let every owner read the checkpoint, or its own only. Raises InvalidRequest or NotFound."""
    _change(database, owner_id, address, "publish" if public else "unpublish", public=public)


def set_ttl(database: Database, owner_id: str, address: Address, ttl_seconds: int | None) -> None:
    """Let the checkpoint live for so long from now, or for ever. Raises InvalidRequest or NotFound."""
    expires_at = utc_now() + timedelta(seconds=ttl_seconds) if ttl_seconds is not None else None
    _change(database, owner_id, address, "set_ttl", expires_at=expires_at)


def remove(database: Database, owner_id: str, address: Address) -> None:
    """Delete the name; who holds its snapshot keeps it. Raises InvalidRequest or NotFound."""
    with database.write() as session:
        _require_one(session.execute(delete(Checkpoint).where(*_its_own(owner_id, address))), address)
        _record(session, owner_id, address, "delete")


def _change(database: Database, owner_id: str, address: Address, action: str, **values: Any) -> None:
    query = update(Checkpoint).where(*_its_own(owner_id, address)).values(**values)
    with database.write() as session:
        _require_one(session.execute(query), address)
        _record(session, owner_id, address, action)


def _record(session: Session, owner_id: str, address: Address, action: str) -> None:
    details = {"model_id": address.model_id, "tinker_path": str(address)}
    audit.record(session, owner_id, "checkpoints", f"checkpoint_{action}", **details)


def _its_own(owner_id: str, address: Address) -> list[ColumnElement[bool]]:
    if address.kind not in _TYPES:
        raise InvalidRequest(f"checkpoint_id: {address.kind!r} is no kind of checkpoint; kinds are {', '.join(_TYPES)}")
    named = [
        Checkpoint.model_id == address.model_id,
        Checkpoint.kind == address.kind,
        Checkpoint.name == address.name,
    ]
    return [*named, Checkpoint.owner_id == owner_id, is_live()]


def _require_one(result: Any, address: Address) -> None:
    if result.rowcount != 1:
        raise NotFound(f"checkpoint_id: there is no checkpoint {str(address)!r}")
