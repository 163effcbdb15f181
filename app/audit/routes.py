"""The audit log over HTTP. It is small, so it is answered here; the hosted service redirects to a file."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from app.audit import service
from app.audit.schemas import AuditLog, AuditQuery, Entry
from app.db import utc_now
from app.deps import OwnerDep, ServicesDep, in_thread

router = APIRouter(prefix="/api/v1", tags=["audit"])


@router.get("/audit")
async def audit_log(asked: Annotated[AuditQuery, Query()], owner_id: OwnerDep, services: ServicesDep) -> AuditLog:
    """What happened to the caller's keys, checkpoints and projects on a day in UTC; without `day`, today."""
    resource = None if asked.event_type == "all" else asked.event_type
    day = asked.day or utc_now().date()
    rows = await in_thread(service.entries_of_day, services.database, owner_id, resource, day)
    return AuditLog(
        entries=[
            Entry(
                timestamp=row.at,
                event=row.event,
                event_details=row.details,
                model_id=row.details.get("model_id"),
                tinker_path=row.details.get("tinker_path"),
                purpose=row.details.get("purpose"),
            )
            for row in rows
        ]
    )
