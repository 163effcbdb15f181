"""Snapshots (immutable blobs) and the checkpoints (names) that point at them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, Integer, String, false
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, UtcDateTime, utc_now


class Snapshot(Base):
    """A run's state at one `seq_id`, in the blob store under `snapshots/<id>/`. The id is never used again.

    `kind` is `state` (adapter, optimizer, counters: what training resumes from), `adapter` (what samplers load) or
    `external` (an adapter to be downloaded, perhaps encrypted).
    `session_id` is set on ephemeral sampler snapshots, which live with their session. `unused_since`: when the janitor
    first found that nothing refers to it any more (`references`).
    """

    __tablename__ = "snapshots"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner_id: Mapped[str] = mapped_column(ForeignKey("owners.id"), index=True)
    model_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), index=True)
    seq_id: Mapped[int] = mapped_column(Integer)
    kind: Mapped[str] = mapped_column(String(16))
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    session_id: Mapped[str | None] = mapped_column(String(64), index=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    unused_since: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Upload(Base):
    """A snapshot whose row is there while its files are only in a folder that some workers share, on their way to the
    blob store."""

    __tablename__ = "uploads"

    snapshot_id: Mapped[str] = mapped_column(ForeignKey("snapshots.id", ondelete="CASCADE"), primary_key=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now, index=True)


class Reservation(Base):
    """Room in its owner's quota for a save that is under way, by the operation that saves: what it will add to the sum.
    It goes with the commit that names the checkpoint, and where that never comes, after a while."""

    __tablename__ = "reservations"

    model_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    seq_id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    owner_id: Mapped[str] = mapped_column(ForeignKey("owners.id"), index=True)
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)


class Checkpoint(Base):
    """A name: `tinker://<model_id>/<kind>/<name>`, kind `weights`, `sampler_weights` or `external_weights`. Every
    owner can read a `public` one; only its own can change it."""

    __tablename__ = "checkpoints"
    __table_args__ = (
        Index("ux_checkpoints_path", "model_id", "kind", "name", unique=True),
        Index("ix_checkpoints_owner_created", "owner_id", "created_at"),
    )

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    owner_id: Mapped[str] = mapped_column(ForeignKey("owners.id"))
    model_id: Mapped[str] = mapped_column(ForeignKey("runs.id"))
    kind: Mapped[str] = mapped_column(String(20))
    name: Mapped[str] = mapped_column(String(200))
    snapshot_id: Mapped[str] = mapped_column(ForeignKey("snapshots.id"), index=True)
    user_metadata: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime, index=True)
    public: Mapped[bool] = mapped_column(default=False, server_default=false())
