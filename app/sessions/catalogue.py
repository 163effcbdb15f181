"""Sessions as people see them: listed, looked at, moved into projects. A project is a label; who uses one makes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import select, update

from app.audit import service as audit
from app.db import Database
from app.errors import NotFound
from app.paging import readable_metadata
from app.runs.models import Run
from app.sampling.models import SamplingSession
from app.sessions.catalogue_schemas import SessionInfo, SessionsQuery
from app.sessions.models import ClientSession


def list_sessions(database: Database, owner_id: str, asked: SessionsQuery) -> Sequence[str]:
    """Ids of a page of the owner's sessions, newest first."""
    query = (
        select(ClientSession.id)
        .where(ClientSession.owner_id == owner_id)
        .order_by(ClientSession.created_at.desc(), ClientSession.id.desc())
        .limit(asked.limit)
        .offset(asked.offset)
    )
    with database.read() as session:
        return session.scalars(query).all()


def get_session(database: Database, owner_id: str, session_id: str) -> SessionInfo:
    """What a session has made. Raises NotFound."""
    runs = select(Run.id).where(Run.session_id == session_id).order_by(Run.model_seq_id)
    samplers = (
        select(SamplingSession.id).where(SamplingSession.session_id == session_id).order_by(SamplingSession.seq_id)
    )
    with database.read() as session:
        row = session.scalar(
            select(ClientSession).where(ClientSession.id == session_id, ClientSession.owner_id == owner_id)
        )
        if row is None:
            raise _missing(session_id)
        return SessionInfo(
            training_run_ids=list(session.scalars(runs.where(Run.owner_id == owner_id))),
            sampler_ids=list(session.scalars(samplers.where(SamplingSession.owner_id == owner_id))),
            user_metadata=readable_metadata(row.user_metadata),
            display_name=row.display_name,
            tags=row.tags,
        )


def assign_project(database: Database, owner_id: str, session_id: str, project_id: str) -> None:
    """Move a session, with its runs and samplers, into a project. Raises NotFound."""
    query = (
        update(ClientSession)
        .where(ClientSession.id == session_id, ClientSession.owner_id == owner_id)
        .values(project_id=project_id)
    )
    with database.write() as session:
        moved: Any = session.execute(query)
        if moved.rowcount != 1:
            raise _missing(session_id)
        audit.record(
            session, owner_id, "projects", "project_assign_session", session_id=session_id, project_id=project_id
        )


def _missing(session_id: str) -> NotFound:
    return NotFound(f"session_id: there is no session {session_id!r}")
