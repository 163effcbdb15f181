"""Usage over HTTP."""

from __future__ import annotations

from datetime import datetime

from fastapi import APIRouter

from app.billing import service
from app.billing.schemas import CheckpointStorage, UsageEvents
from app.deps import OwnerDep, ServicesDep, in_thread

router = APIRouter(prefix="/api/v1/billing/usage", tags=["billing"])


@router.get("/events")
async def usage_events(
    starting_on: datetime, ending_before: datetime, owner_id: OwnerDep, services: ServicesDep
) -> UsageEvents:
    """What the caller used, hour by hour. Samples are counted with a lag of a second or two."""
    start, end = service.usage_window(starting_on, ending_before)
    return await in_thread(service.usage_events, services.database, owner_id, start, end)


@router.get("/checkpoints/current")
async def checkpoint_storage(
    owner_id: OwnerDep, services: ServicesDep, project_id: str | None = None
) -> CheckpointStorage:
    """The caller's stored checkpoints."""
    return await in_thread(service.checkpoint_storage, services.database, owner_id, project_id)
