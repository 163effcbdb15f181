"""Snapshots that are not in the blob store yet: which they are, until somebody has uploaded them."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from app.checkpoints.models import Upload


def expect(session: Session, snapshot_id: str) -> None:
    """Note, in the transaction that adds the snapshot, that its files are still to be uploaded."""
    if session.get(Upload, snapshot_id) is None:
        session.add(Upload(snapshot_id=snapshot_id))


def is_waiting(session: Session, snapshot_id: str) -> bool:
    """Whether a snapshot is still to be uploaded."""
    return session.scalar(select(Upload.snapshot_id).where(Upload.snapshot_id == snapshot_id)) is not None


def waiting(session: Session, *, before: datetime | None = None) -> list[str]:
    """The snapshots that are still to be uploaded, oldest first; with `before`, of those saved before it."""
    query = select(Upload.snapshot_id).order_by(Upload.created_at)
    return list(session.scalars(query if before is None else query.where(Upload.created_at < before)))


def uploaded(session: Session, snapshot_id: str) -> None:
    """A snapshot is in the blob store."""
    session.execute(delete(Upload).where(Upload.snapshot_id == snapshot_id))


def give_up(session: Session, *, before: datetime) -> list[str]:
    """Expect no more of the snapshots that nobody has uploaded since `before`: their files are lost. Returns them."""
    lost = waiting(session, before=before)
    session.execute(delete(Upload).where(Upload.snapshot_id.in_(lost)))
    return lost
