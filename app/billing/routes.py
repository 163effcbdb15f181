"""Usage over HTTP."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from app.billing import service
from app.billing.schemas import CheckpointStorage, StorageQuery, UsageEvents, UsageQuery
from app.deps import OwnerDep, ServicesDep, in_thread

router = APIRouter(prefix="/api/v1/billing/usage", tags=["billing"])


@router.get("/events")
async def usage_events(asked: Annotated[UsageQuery, Query()], owner_id: OwnerDep, services: ServicesDep) -> UsageEvents:
    """What the caller used, hour by hour. Samples are counted with a lag of a second or two."""
    start, end = service.usage_window(asked.starting_on, asked.ending_before)
    return await in_thread(service.usage_events, services.database, owner_id, start, end)


@router.get("/checkpoints/current")
async def checkpoint_storage(
    asked: Annotated[StorageQuery, Query()], owner_id: OwnerDep, services: ServicesDep
) -> CheckpointStorage:
    """The caller's stored checkpoints."""
    return await in_thread(service.checkpoint_storage, services.database, owner_id, asked.project_id)
