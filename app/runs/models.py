"""Runs and their operation log."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    case,
    text,
)
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, UtcDateTime, database_clock, utc_now

LOG_FORMAT = 1
"""Version of the bodies and results that this release writes; a worker leaves rows of a newer one to others."""


class Run(Base):
    """One adapter in training (the SDK's model). Operations up to `applied_seq` have taken effect; operation 0 creates
    the run, so a fresh one stands at -1. `epoch` fences every commit of the worker that holds the lease. One that is
    `copied_from` a checkpoint (or from where an adapter was imported) only holds the copy, and is never trained.
    `closed_at`: when nothing of it was left but its checkpoints (`app.sessions.endings`). `crash_count`: workers that
    died while the run stood at `crash_seq`; from the second on only if it was on trial there: `tried_seq`."""

    __tablename__ = "runs"
    __table_args__ = (
        Index("ux_runs_session_seq", "session_id", "model_seq_id", unique=True),
        Index("ix_runs_worker", "worker_id"),
        Index("ix_runs_owner_created", "owner_id", "created_at"),
        Index(
            "ix_runs_open",
            "session_id",
            sqlite_where=text("closed_at IS NULL"),
            postgresql_where=text("closed_at IS NULL"),
        ),
    )

    id: Mapped[str] = mapped_column(String(120), primary_key=True)
    owner_id: Mapped[str] = mapped_column(ForeignKey("owners.id"))
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    model_seq_id: Mapped[int] = mapped_column(Integer)
    base_model: Mapped[str] = mapped_column(String(500))
    pool: Mapped[str | None] = mapped_column(String(120))
    lora_rank: Mapped[int] = mapped_column(Integer)
    lora_alpha: Mapped[float] = mapped_column(Float)
    lora_seed: Mapped[int] = mapped_column(BigInteger)
    train_attn: Mapped[bool] = mapped_column(default=True)
    train_mlp: Mapped[bool] = mapped_column(default=True)
    train_unembed: Mapped[bool] = mapped_column(default=True)
    optimizer: Mapped[dict[str, Any]] = mapped_column(JSON)
    user_metadata: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    last_request_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)

    applied_seq: Mapped[int] = mapped_column(Integer, default=-1)
    failed: Mapped[bool] = mapped_column(default=False)
    worker_id: Mapped[str | None] = mapped_column(String(64))
    epoch: Mapped[int] = mapped_column(Integer, default=0)
    lease_expires_at: Mapped[float | None] = mapped_column(Float)
    crash_seq: Mapped[int | None] = mapped_column(Integer)
    crash_count: Mapped[int] = mapped_column(Integer, default=0)
    recovery_snapshot_id: Mapped[str | None] = mapped_column(String(64))
    sampler_snapshot_id: Mapped[str | None] = mapped_column(String(64))
    copied_from: Mapped[str | None] = mapped_column(String(500))
    closed_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    tried_seq: Mapped[int | None] = mapped_column(Integer)


def holder() -> ColumnElement[str | None]:
    """The worker that holds a run now; None also if it has died, as far as its lease tells."""
    return case((Run.lease_expires_at > database_clock(), Run.worker_id))


class Operation(Base):
    """One request in a run's log. Its primary key is the idempotency key; rows outlive their bodies and results.
    `pass_id`: those with the same one were computed in one pass, and are computed so again when runs are restored."""

    __tablename__ = "operations"
    __table_args__ = (
        Index(
            "ix_operations_accepted",
            "model_id",
            sqlite_where=text("state = 'accepted'"),
            postgresql_where=text("state = 'accepted'"),
        ),
        Index(
            "ix_operations_kept",
            "model_id",
            "seq_id",
            sqlite_where=text("result_kind IS NOT NULL"),
            postgresql_where=text("result_kind IS NOT NULL"),
        ),
        Index(
            "ix_operations_body_blob",
            "body_blob",
            sqlite_where=text("body_blob IS NOT NULL"),
            postgresql_where=text("body_blob IS NOT NULL"),
        ),
        Index(
            "ix_operations_result_blob",
            "result_blob",
            sqlite_where=text("result_blob IS NOT NULL"),
            postgresql_where=text("result_blob IS NOT NULL"),
        ),
        Index(
            "ix_operations_loads",
            "model_id",
            sqlite_where=text("kind = 'load_weights'"),
            postgresql_where=text("kind = 'load_weights'"),
        ),
    )

    model_id: Mapped[str] = mapped_column(ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True)
    seq_id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    request_id: Mapped[str] = mapped_column(String(140), unique=True)
    kind: Mapped[str] = mapped_column(String(40))
    state: Mapped[str] = mapped_column(String(16), default="accepted")
    format: Mapped[int] = mapped_column(Integer, default=LOG_FORMAT)
    fingerprint: Mapped[str] = mapped_column(String(64))
    tokens: Mapped[int] = mapped_column(Integer, default=0)
    body: Mapped[bytes | None] = mapped_column(LargeBinary)
    body_blob: Mapped[str | None] = mapped_column(String(120))
    body_bytes: Mapped[int] = mapped_column(Integer, default=0)
    result: Mapped[bytes | None] = mapped_column(LargeBinary)
    result_blob: Mapped[str | None] = mapped_column(String(120))
    result_kind: Mapped[str | None] = mapped_column(String(16))
    error: Mapped[str | None] = mapped_column(Text)
    error_category: Mapped[str | None] = mapped_column(String(16))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    pass_id: Mapped[int | None] = mapped_column(BigInteger)
