"""Routes that show sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from app.deps import OwnerDep, ServicesDep, in_thread
from app.paging import Scoped
from app.sessions import catalogue
from app.sessions.catalogue_schemas import (
    AssignProject,
    SearchSessions,
    SessionIds,
    SessionInfo,
    SessionsFound,
    SessionsQuery,
)
from app.sessions.search import search

router = APIRouter(prefix="/api/v1", tags=["sessions"])


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
async def export_trace(session_id: str, owner_id: OwnerDep, services: ServicesDep) -> None:
    """Refused: no timelines are kept."""
    await in_thread(catalogue.refuse_trace, services.database, owner_id, session_id)
