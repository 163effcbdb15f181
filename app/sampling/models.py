"""Sampling sessions, which clients sample from, and the samples that are on record."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, Integer, LargeBinary, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, UtcDateTime, utc_now


class SamplingSession(Base):
    """A target of `asample`: the base model (`snapshot_id` null), one immutable snapshot, or, when `follows_model_id`
    is set (kind `inflight`), that run's newest sampler snapshot at the moment of each submit.

    `last_used_at`: when it was made or sampled from, to a few minutes; null: an older release made it and did not note
    that.
    """

    __tablename__ = "sampling_sessions"
    __table_args__ = (Index("ux_sampling_sessions_seq", "session_id", "seq_id", unique=True),)

    id: Mapped[str] = mapped_column(String(120), primary_key=True)
    owner_id: Mapped[str] = mapped_column(ForeignKey("owners.id"), index=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    seq_id: Mapped[int] = mapped_column(Integer)
    base_model: Mapped[str] = mapped_column(String(500))
    pool: Mapped[str] = mapped_column(String(120))
    model_path: Mapped[str | None] = mapped_column(String(500))
    snapshot_id: Mapped[str | None] = mapped_column(String(64), index=True)
    follows_model_id: Mapped[str | None] = mapped_column(String(120))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    clients: Mapped[int] = mapped_column(Integer, default=0, server_default="0")
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=utc_now)


class RecordedSample(Base):
    """A finished sample whose client asked for `record_stability_info`. `prompt`: its tokens, little-endian int32;
    `response`: the SampleResponse that the client gets, byte for byte (WIRE §4.3). Written before the client sees it
    and never changed."""

    __tablename__ = "recorded_samples"

    request_id: Mapped[str] = mapped_column(String(160), primary_key=True)
    owner_id: Mapped[str] = mapped_column(ForeignKey("owners.id"))
    session_id: Mapped[str] = mapped_column(String(64))
    prompt: Mapped[bytes] = mapped_column(LargeBinary)
    response: Mapped[bytes] = mapped_column(LargeBinary)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now, index=True)
