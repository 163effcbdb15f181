"""Uploaded loss functions."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, UtcDateTime, utc_now


class CustomLoss(Base):
    """The `seq_id`-th loss that a session uploaded. `graph`: its canonical JSON, null if it was refused with `error`.
    An operation that uses a loss carries a copy of the graph, so it never needs this row again."""

    __tablename__ = "custom_losses"
    __table_args__ = (Index("ux_custom_losses_session_seq", "session_id", "seq_id", unique=True),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner_id: Mapped[str] = mapped_column(ForeignKey("owners.id"), index=True)
    session_id: Mapped[str] = mapped_column(ForeignKey("sessions.id"))
    seq_id: Mapped[int] = mapped_column(Integer)
    fingerprint: Mapped[str] = mapped_column(String(64))
    graph: Mapped[str | None] = mapped_column(Text)
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
