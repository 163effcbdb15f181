"""`create_custom_loss`: a future that is over as soon as it is made."""

from __future__ import annotations

from fastapi import APIRouter, Request

from app.custom_losses import service
from app.custom_losses.schemas import CreateCustomLoss
from app.deps import OwnerDep, ServicesDep, in_thread, json_body
from app.errors import TooLarge
from app.runs.openapi import json_body_of
from app.runs.schemas import Future

router = APIRouter(prefix="/api/v1", tags=["training"])

MAX_BODY_BYTES = 2**22
"""Far above the largest graph, so that one somewhat too large is told so by its future."""


@router.post("/create_custom_loss", openapi_extra=json_body_of(CreateCustomLoss))
async def create_custom_loss(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Future:
    """Upload a traced loss function; `forward_backward` names it by the id that the future gives."""
    if len(await request.body()) > MAX_BODY_BYTES:
        raise TooLarge(f"graph: the body exceeds {MAX_BODY_BYTES} bytes")
    body = await json_body(request)
    return Future(request_id=await in_thread(service.create, services.database, owner_id, body))
