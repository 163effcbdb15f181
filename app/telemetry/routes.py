"""`GET /metrics` of the service itself, for who has the token. It names no tenant, but whoever has no key shall not see
what is served and how busy it is.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from app.deps import ServicesDep, in_thread
from app.errors import NotFound
from app.telemetry.metrics import may_read

router = APIRouter(tags=["fleet"])


@router.get("/metrics", include_in_schema=False)
async def metrics(services: ServicesDep, authorization: Annotated[str, Header()] = "") -> Response:
    """The page, for who sends `TINWORKS_METRICS_TOKEN` as a bearer token; there is none for others."""
    if not may_read(services.settings, authorization):
        raise NotFound("Not Found")
    return Response(await in_thread(services.metrics.text), media_type=CONTENT_TYPE_LATEST)
