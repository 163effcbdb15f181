"""Checkpoints by path: what a `tinker://` path points at, and the rows that a save makes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import ColumnElement, or_, select, true
from sqlalchemy.orm import Session

from app.checkpoints.models import Checkpoint, Snapshot
from app.db import utc_now
from app.errors import InvalidRequest, NotFound
from app.runs.models import Run

TRAINING, SAMPLER, EXTERNAL = "weights", "sampler_weights", "external_weights"
LOADABLE = frozenset({TRAINING, SAMPLER})
"""What runs and samplers can be made of; the rest is for downloading only."""
KINDS = LOADABLE | {EXTERNAL}
_PATH = re.compile(
    r"tinker://(?P<model_id>[^/\s\0]+)/(?P<kind>weights|sampler_weights|external_weights)/(?P<name>[A-Za-z0-9._-]+)"
)


def tinker_path(model_id: str, kind: str, name: str) -> str:
    """The path that clients use for a checkpoint."""
    return f"tinker://{model_id}/{kind}/{name}"


def snapshot_folder(snapshot_id: str) -> str:
    """Where a snapshot's files are in the blob store."""
    return f"snapshots/{snapshot_id}"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A checkpoint, the snapshot it names, and the run that made it."""

    checkpoint: Checkpoint
    snapshot: Snapshot
    run: Run


def is_live() -> ColumnElement[bool]:
    """Whether a checkpoint has not expired."""
    return or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > utc_now())


def is_readable(owner_id: str) -> ColumnElement[bool]:
    """Whether an owner can read a checkpoint: it is theirs, or published."""
    return or_(Checkpoint.owner_id == owner_id, Checkpoint.public)


def resolve(session: Session, owner_id: str, path: str, *, field: str, kinds: Collection[str] = LOADABLE) -> Resolved:
    """The checkpoint at `path`, the owner's or a published one. Raises InvalidRequest for a malformed path or one of
    another kind, NotFound otherwise."""
    return _resolve(session, path, field, kinds, is_readable(owner_id))


def resolve_for_operator(session: Session, path: str, *, field: str) -> Resolved:
    """The checkpoint at `path`, whoever's it is; not for requests. Raises InvalidRequest or NotFound."""
    return _resolve(session, path, field, KINDS, true())


def _resolve(
    session: Session, path: str, field: str, kinds: Collection[str], is_allowed: ColumnElement[bool]
) -> Resolved:
    match = _PATH.fullmatch(path)
    if match is None:
        raise InvalidRequest(f"{field}: {path!r} is not of the form tinker://<run>/{'|'.join(sorted(kinds))}/<name>")
    if match["kind"] not in kinds:
        wanted = " or ".join(sorted(kinds))
        raise InvalidRequest(f"{field}: {path!r} is one of {match['kind']}; what is needed is one of {wanted}")
    row = session.execute(
        select(Checkpoint, Snapshot, Run)
        .join(Snapshot, Snapshot.id == Checkpoint.snapshot_id)
        .join(Run, Run.id == Snapshot.model_id)
        .where(
            Checkpoint.model_id == match["model_id"],
            Checkpoint.kind == match["kind"],
            Checkpoint.name == match["name"],
            is_allowed,
            is_live(),
        )
    ).one_or_none()
    if row is None:
        raise NotFound(f"{field}: there is no checkpoint {path!r}")
    return Resolved(*row)


def exists(session: Session, model_id: str, kind: str, name: str) -> bool:
    """Whether a run has a checkpoint of that kind and name. One that has expired leaves its name free."""
    query = select(Checkpoint.id).where(
        Checkpoint.model_id == model_id, Checkpoint.kind == kind, Checkpoint.name == name, is_live()
    )
    return session.scalar(query) is not None


def add_snapshot(
    session: Session,
    *,
    snapshot_id: str,
    owner_id: str,
    model_id: str,
    seq_id: int,
    kind: str,
    size_bytes: int,
    session_id: str | None = None,
) -> None:
    """The row of a snapshot whose files are all written; a second save that shares the blob adds nothing."""
    if session.get(Snapshot, snapshot_id) is not None:
        return
    session.add(
        Snapshot(
            id=snapshot_id,
            owner_id=owner_id,
            model_id=model_id,
            seq_id=seq_id,
            kind=kind,
            size_bytes=size_bytes,
            session_id=session_id,
        )
    )
    session.flush()


def name_snapshot(
    session: Session,
    *,
    owner_id: str,
    model_id: str,
    kind: str,
    name: str,
    snapshot_id: str,
    ttl_seconds: int | None,
    user_metadata: Mapping[str, str] | None,
) -> str:
    """Point a name at a snapshot and return its path. A name that exists is pointed anew, and is not public then."""
    query = select(Checkpoint).where(Checkpoint.model_id == model_id, Checkpoint.kind == kind, Checkpoint.name == name)
    row = session.scalar(query) or Checkpoint(owner_id=owner_id, model_id=model_id, kind=kind, name=name)
    now = utc_now()
    row.snapshot_id = snapshot_id
    row.user_metadata = dict(user_metadata) if user_metadata is not None else None
    row.created_at = now
    row.public = False
    row.expires_at = now + timedelta(seconds=ttl_seconds) if ttl_seconds is not None else None
    session.add(row)
    session.flush()
    return tinker_path(model_id, kind, name)
