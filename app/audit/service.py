"""Writing the audit log, in the transaction of what it tells of, and reading it by day."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from typing import Any, Literal

from sqlalchemy import select
from sqlalchemy.orm import Session

from app.audit.models import AuditEntry
from app.db import Database

Resource = Literal["checkpoints", "projects", "teams", "organizations"]


def record(session: Session, owner_id: str, resource: Resource, event: str, **details: Any) -> None:
    """Add an entry to the running transaction. `event` is `<resource>_<action>`; `details` must be JSON."""
    session.add(AuditEntry(owner_id=owner_id, resource=resource, event=event, details=details))


def entries_of_day(database: Database, owner_id: str, resource: Resource | None, day: date) -> list[AuditEntry]:
    """The owner's entries of one day in UTC, oldest first; all resources for None."""
    start, end = datetime.combine(day, time.min, UTC), datetime.combine(day, time.max, UTC)
    query = (
        select(AuditEntry)
        .where(AuditEntry.owner_id == owner_id, AuditEntry.at >= start, AuditEntry.at <= end)
        .order_by(AuditEntry.at, AuditEntry.id)
    )
    if resource is not None:
        query = query.where(AuditEntry.resource == resource)
    with database.read() as session:
        return list(session.scalars(query))
