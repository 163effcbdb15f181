"""Routes that show sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.deps import OwnerDep, ServicesDep, in_thread
from app.json_route import StrictJsonRoute
from app.paging import Scoped
from app.responses import PayloadResponse
from app.sessions import catalogue
from app.sessions.catalogue_schemas import (
    AssignProject,
    SearchSessions,
    SessionIds,
    SessionInfo,
    SessionsFound,
    SessionsQuery,
    TraceExport,
)
from app.sessions.search import search
from app.sessions.traces import ROUTE as TRACES

router = APIRouter(prefix="/api/v1", tags=["sessions"], route_class=StrictJsonRoute)


@router.get("/sessions")
async def list_sessions(
    asked: Annotated[SessionsQuery, Query()], owner_id: OwnerDep, services: ServicesDep
) -> SessionIds:
    """Sessions, newest first. Nobody can share one, so the accessible ones are the caller's own."""
    return SessionIds(sessions=list(await in_thread(catalogue.list_sessions, services.database, owner_id, asked)))


@router.post("/sessions/search", response_model_exclude_none=True)
async def search_sessions(body: SearchSessions, owner_id: OwnerDep, services: ServicesDep) -> SessionsFound:
    """Sessions that match, newest first, a page at a time."""
    return await in_thread(search, services.database, owner_id, body)


@router.get("/sessions/{session_id}")
async def get_session(
    session_id: str, asked: Annotated[Scoped, Query()], owner_id: OwnerDep, services: ServicesDep
) -> SessionInfo:
    """The runs and samplers of a session."""
    return await in_thread(catalogue.get_session, services.database, owner_id, session_id)


@router.put("/sessions/{session_id}/project", status_code=204)
async def assign_project(session_id: str, body: AssignProject, owner_id: OwnerDep, services: ServicesDep) -> None:
    """Move a session into a project."""
    await in_thread(catalogue.assign_project, services.database, owner_id, session_id, body.project_id)


@router.get("/sessions/{session_id}/trace_export")
async def export_trace(session_id: str, request: Request, owner_id: OwnerDep, services: ServicesDep) -> TraceExport:
    """A signed URL of the session's timeline. There is nothing to wait for: it is made when it is fetched."""
    url = await in_thread(services.traces.url, owner_id, session_id, str(request.base_url))
    return TraceExport(url=url)


@router.get(TRACES.removeprefix(router.prefix) + "/{token}/{filename}")
async def download_trace(token: str, filename: str, services: ServicesDep) -> Response:
    """A session's timeline as a Perfetto trace; the URL is the permission."""
    trace = await in_thread(services.traces.read, token)
    return PayloadResponse([trace], media_type="application/octet-stream")
