"""Owners (tenants), their API keys, and the secret that tokens are signed with."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import ForeignKey, String
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, UtcDateTime, utc_now


class Owner(Base):
    """A tenant: everything that a request can reach belongs to exactly one."""

    __tablename__ = "owners"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(200), unique=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)


class ApiKey(Base):
    """A key of an owner. Only its SHA-256 is stored; keys carry 256 random bits, so nothing slower is needed."""

    __tablename__ = "api_keys"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    owner_id: Mapped[str] = mapped_column(ForeignKey("owners.id"), index=True)
    name: Mapped[str] = mapped_column(String(200), default="")
    prefix: Mapped[str] = mapped_column(String(16))
    key_hash: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class Secret(Base):
    """A random secret that a migration made, for an installation that sets no `TINWORKS_SECRET_KEY`."""

    __tablename__ = "secrets"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    value: Mapped[str] = mapped_column(String(128))
