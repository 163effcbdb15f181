"""Query and answer of `GET audit` (WIRE §2.6)."""

from __future__ import annotations

from datetime import date, datetime
from typing import Any, Literal

from pydantic import BaseModel

from app.audit.service import Resource
from app.paging import Query


class AuditQuery(Query):
    """Query of `GET audit`; a day in UTC."""

    event_type: Literal["all"] | Resource = "all"
    day: date | None = None


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
