"""How much a tenant may store: `TINWORKS_TENANT_STORAGE_BYTES`, over all checkpoints of one owner.

What counts is what has a name: a snapshot with several names counts once, one that only a session samples from does
not. A save reserves its room before it stores anything, and gives it back with the commit that names the checkpoint.
Who counts holds a lock on the owner, so saves at the same time see each other, on whatever workers they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import ColumnElement, Select, and_, delete, func, not_, or_, select
from sqlalchemy.orm import Session

from app.accounts.models import Owner
from app.checkpoints.models import Checkpoint, Reservation, Snapshot
from app.checkpoints.service import is_live
from app.db import utc_now
from app.errors import InvalidRequest

GIVEN_UP_AFTER = timedelta(hours=1)
"""Longer than any save. A worker that died in one left a reservation, which the same operation takes over; one that
nobody repeats counts no longer than this."""


@dataclass(frozen=True, slots=True)
class NewName:
    """A checkpoint that is about to be made; one of that name is replaced."""

    owner_id: str
    model_id: str
    kind: str
    name: str


def check_quota(
    session: Session,
    new: NewName,
    *,
    snapshot_id: str,
    size_bytes: int | None,
    limit: int,
    seq_id: int | None = None,
    field: str = "path",
) -> int:
    """Raise InvalidRequest if the owner's checkpoints would have more than `limit` bytes with this one; 0: no limit.
    Returns by how much they grow. The owner is locked until the transaction ends: until then nobody else counts.

    `size_bytes`: of the snapshot, if it has no row yet. `seq_id`: the operation of `new.model_id` that saves; what it
    has reserved does not count.
    """
    if not limit:
        return 0
    session.execute(select(Owner.id).where(Owner.id == new.owner_id).with_for_update(key_share=True))
    if size_bytes is None:
        size_bytes = session.get_one(Snapshot, snapshot_id).size_bytes
    named = _named_by_others(new)
    sizes = select(func.sum(Snapshot.size_bytes)).where(Snapshot.id.in_(named), Snapshot.id != snapshot_id)
    others = int(session.scalar(sizes) or 0) + _reserved_by_others(session, new, seq_id)
    if others + size_bytes > limit:
        raise InvalidRequest(
            f"{field}: the checkpoint has {size_bytes:,} bytes and your others have {others:,}; the storage quota is "
            f"{limit:,} (TINWORKS_TENANT_STORAGE_BYTES). Delete some, or let them expire"
        )
    is_named = session.scalar(select(Snapshot.id).where(Snapshot.id == snapshot_id, Snapshot.id.in_(named))) is not None
    return 0 if is_named else size_bytes


def reserve(
    session: Session, new: NewName, *, seq_id: int, snapshot_id: str, size_bytes: int | None, limit: int
) -> None:
    """`check_quota`, and keep the room for the operation `seq_id` of the run until `release`. Again for the same
    operation, it is the same room."""
    growth = check_quota(session, new, snapshot_id=snapshot_id, size_bytes=size_bytes, limit=limit, seq_id=seq_id)
    session.execute(delete(Reservation).where(Reservation.owner_id == new.owner_id, _is_given_up()))
    key = {"model_id": new.model_id, "seq_id": seq_id, "owner_id": new.owner_id}
    session.merge(Reservation(**key, size_bytes=growth, created_at=utc_now()))
    session.flush()


def release(session: Session, model_id: str, seq_id: int) -> None:
    """Give the room of an operation back."""
    session.execute(delete(Reservation).where(Reservation.model_id == model_id, Reservation.seq_id == seq_id))


def _named_by_others(new: NewName) -> Select[str]:
    """The owner's snapshots that have a name beside the new one."""
    replaced = and_(Checkpoint.model_id == new.model_id, Checkpoint.kind == new.kind, Checkpoint.name == new.name)
    return select(Checkpoint.snapshot_id).where(Checkpoint.owner_id == new.owner_id, is_live(), not_(replaced))


def _reserved_by_others(session: Session, new: NewName, seq_id: int | None) -> int:
    query = select(func.sum(Reservation.size_bytes)).where(Reservation.owner_id == new.owner_id, not_(_is_given_up()))
    if seq_id is not None:
        query = query.where(or_(Reservation.model_id != new.model_id, Reservation.seq_id != seq_id))
    return int(session.scalar(query) or 0)


def _is_given_up() -> ColumnElement[bool]:
    return Reservation.created_at < utc_now() - GIVEN_UP_AFTER
