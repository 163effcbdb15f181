"""Answer of `GET audit` (WIRE §2.6)."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel


class Entry(BaseModel):
    """One event. The fields after `event_details` repeat what it holds, for older clients."""

    timestamp: datetime
    event: str
    event_details: dict[str, Any]
    model_id: str | None = None
    tinker_path: str | None = None
    purpose: str | None = None


class AuditLog(BaseModel):
    """The entries of one day, oldest first."""

    entries: list[Entry]
