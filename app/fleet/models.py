"""Base models and workers, as workers register them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, Float, ForeignKey, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from app.db import Base, UtcDateTime, utc_now


class Model(Base):
    """A base model, one per pool. The API answers capabilities and checks inputs from this row. `tokenizer_blob`: where
    its tokenizer is in the blob store (`app.compat.tokenizer`), if it has one."""

    __tablename__ = "models"

    pool: Mapped[str] = mapped_column(String(120), primary_key=True)
    source: Mapped[str] = mapped_column(Text)
    architecture: Mapped[str] = mapped_column(String(120))
    vocab_size: Mapped[int] = mapped_column(Integer)
    context_length: Mapped[int] = mapped_column(Integer)
    config_hash: Mapped[str] = mapped_column(String(64))
    updated_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    tokenizer_blob: Mapped[str | None] = mapped_column(String(120))


class ModelName(Base):
    """A name under which clients ask for a model. `client_name` and `tokenizer_id` are what the SDK is told, so that it
    finds a tokenizer (WIRE §8)."""

    __tablename__ = "model_names"

    name: Mapped[str] = mapped_column(String(500), primary_key=True)
    pool: Mapped[str] = mapped_column(ForeignKey("models.pool", ondelete="CASCADE"), index=True)
    position: Mapped[int] = mapped_column(Integer, default=0)
    client_name: Mapped[str] = mapped_column(String(500))
    tokenizer_id: Mapped[str | None] = mapped_column(String(500))


class Worker(Base):
    """A worker process. `last_seen` is in seconds of the database's clock; a clean shutdown deletes the row."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    pool: Mapped[str] = mapped_column(String(120), index=True)
    roles: Mapped[list[str]] = mapped_column(JSON)
    host: Mapped[str] = mapped_column(String(255))
    pid: Mapped[int] = mapped_column(Integer)
    slots: Mapped[int] = mapped_column(Integer, default=0)
    resident_runs: Mapped[int] = mapped_column(Integer, default=0)
    queued_tokens: Mapped[int] = mapped_column(Integer, default=0)
    phase: Mapped[str] = mapped_column(String(32), default="starting")
    draining: Mapped[bool] = mapped_column(default=False)
    detail: Mapped[dict[str, Any] | None] = mapped_column(JSON)
    started_at: Mapped[datetime] = mapped_column(UtcDateTime, default=utc_now)
    last_seen: Mapped[float] = mapped_column(Float)
