"""The audit log: who did what to keys, checkpoints and projects."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, ForeignKey, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, UtcDateTime, utc_now


class AuditEntry(Base):
    """One event. `resource` is what clients filter by: checkpoints, projects, teams or organizations."""

    __tablename__ = "audit_log"
    __table_args__ = (Index("ix_audit_log_owner_at", "owner_id", "at"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    owner_id: Mapped[str] = mapped_column(ForeignKey("owners.id"))
    at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    resource: Mapped[str] = mapped_column(String(32))
    event: Mapped[str] = mapped_column(String(64))
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
