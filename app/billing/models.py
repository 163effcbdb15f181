"""Usage: what each session has used, hour by hour."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, UtcDateTime


class Usage(Base):
    """An amount (tokens, or checkpoints) of one kind in the hour that begins at `hour`. Rows outlive their session."""

    __tablename__ = "usage"

    owner_id: Mapped[str] = mapped_column(ForeignKey("owners.id"), primary_key=True)
    hour: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    session_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    base_model: Mapped[str] = mapped_column(String(500), primary_key=True)
    kind: Mapped[str] = mapped_column(String(32), primary_key=True)
    amount: Mapped[int] = mapped_column(BigInteger)
