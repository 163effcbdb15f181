"""Client sessions: one per SDK process."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, UtcDateTime, utc_now


class ClientSession(Base):
    """A session, kept alive by heartbeats. `finish_reason` is set once, by the first `finish`."""

    __tablename__ = "sessions"
    __table_args__ = (
        Index("ux_sessions_idempotency", "owner_id", "idempotency_key", unique=True),
        Index("ix_sessions_owner_created", "owner_id", "created_at"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    owner_id: Mapped[str] = mapped_column(ForeignKey("owners.id"))
    idempotency_key: Mapped[str | None] = mapped_column(String(200))
    sdk_version: Mapped[str] = mapped_column(String(64), default="")
    project_id: Mapped[str | None] = mapped_column(String(200))
    display_name: Mapped[str | None] = mapped_column(String(200))
    tags: Mapped[list[str]] = mapped_column(JSON, default=list)
    user_metadata: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    last_seen_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    silent_since: Mapped[datetime | None] = mapped_column(UtcDateTime)
    finish_reason: Mapped[str | None] = mapped_column(String(32))
    finish_detail: Mapped[str | None] = mapped_column(Text)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
