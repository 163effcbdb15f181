"""How much a tenant may store: `TINWORKS_TENANT_STORAGE_BYTES`, over all checkpoints of one owner.

What counts is what has a name: a snapshot with several names counts once, one that only a session samples from does
not. Saves that are under way at the same time do not see each other, so the sum may exceed the quota by those.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import and_, func, not_, select
from sqlalchemy.orm import Session

from app.checkpoints.models import Checkpoint, Snapshot
from app.checkpoints.service import is_live
from app.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class NewName:
    """A checkpoint that is about to be made; one of that name is replaced."""

    owner_id: str
    model_id: str
    kind: str
    name: str


def check_quota(
    session: Session, new: NewName, *, snapshot_id: str, size_bytes: int | None, limit: int, field: str = "path"
) -> None:
    """Raise InvalidRequest if the owner's checkpoints would have more than `limit` bytes with this one; 0: no limit.
    `size_bytes`: of the snapshot, if it has no row yet."""
    if not limit:
        return
    if size_bytes is None:
        size_bytes = session.get_one(Snapshot, snapshot_id).size_bytes
    others = _size_of_others(session, new, snapshot_id)
    if others + size_bytes > limit:
        raise InvalidRequest(
            f"{field}: the checkpoint has {size_bytes:,} bytes and your others have {others:,}; the storage quota is "
            f"{limit:,} (TINWORKS_TENANT_STORAGE_BYTES). Delete some, or let them expire"
        )


def _size_of_others(session: Session, new: NewName, snapshot_id: str) -> int:
    replaced = and_(Checkpoint.model_id == new.model_id, Checkpoint.kind == new.kind, Checkpoint.name == new.name)
    named = select(Checkpoint.snapshot_id).where(Checkpoint.owner_id == new.owner_id, is_live(), not_(replaced))
    query = select(func.sum(Snapshot.size_bytes)).where(Snapshot.id.in_(named), Snapshot.id != snapshot_id)
    return int(session.scalar(query) or 0)
