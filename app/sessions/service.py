"""What sessions do: begin, stay alive, finish."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta

from sqlalchemy import bindparam, exists, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.db import Database, utc_now
from app.errors import Gone, NotFound
from app.runs.log import UNLOADED_SEQ
from app.runs.models import Operation, Run, holder
from app.sessions.models import ClientSession
from app.sessions.schemas import CreateSession, FinishSession

_TOUCH_EVERY = timedelta(seconds=5)


def create_session(database: Database, owner_id: str, request: CreateSession, idempotency_key: str | None) -> str:
    """Begin a session and return its id; the same idempotency key gives the same session."""
    known = _by_idempotency(database, owner_id, idempotency_key)
    if known:
        return known
    row = ClientSession(
        id=str(uuid.uuid4()),
        owner_id=owner_id,
        idempotency_key=idempotency_key or None,
        sdk_version=request.sdk_version,
        project_id=request.project_id,
        display_name=request.display_name,
        tags=request.tags,
        user_metadata=request.user_metadata,
    )
    try:
        with database.write() as session:
            session.add(row)
    except IntegrityError:
        known = _by_idempotency(database, owner_id, idempotency_key)
        if known is None:
            raise
        return known
    return row.id


def _by_idempotency(database: Database, owner_id: str, key: str | None) -> str | None:
    if not key:
        return None
    query = select(ClientSession.id).where(ClientSession.owner_id == owner_id, ClientSession.idempotency_key == key)
    with database.read() as session:
        return session.scalar(query)


def require_live(session: Session, owner_id: str, session_id: str) -> ClientSession:
    """The owner's session, marked as seen. Raises NotFound, or Gone once it is finished."""
    row = session.scalar(
        select(ClientSession).where(ClientSession.id == session_id, ClientSession.owner_id == owner_id)
    )
    if row is None:
        raise NotFound(f"session_id: there is no session {session_id!r}")
    if row.finished_at is not None:
        raise Gone(f"session_id: session {session_id!r} is finished")
    now = utc_now()
    if now - row.last_seen_at > _TOUCH_EVERY or row.silent_since is not None:
        row.last_seen_at = now
        row.silent_since = None
    return row


@dataclass(frozen=True, slots=True)
class LiveRun:
    """Where a run's requests go: its pool, and the worker that holds it, if one does. One that is `unloaded` takes no
    more operations."""

    pool: str | None
    worker_id: str | None
    unloaded: bool


_LIVE_RUN = (
    select(
        Run.pool,
        holder().label("worker_id"),
        Run.last_request_at,
        ClientSession.id,
        ClientSession.last_seen_at,
        ClientSession.silent_since,
        ClientSession.finished_at,
        exists().where(Operation.model_id == Run.id, Operation.seq_id == UNLOADED_SEQ).label("unloaded"),
    )
    .join(ClientSession, ClientSession.id == Run.session_id)
    .where(Run.id == bindparam("model_id"), Run.owner_id == bindparam("owner_id"))
)


def require_live_run(session: Session, owner_id: str, model_id: str) -> LiveRun:
    """The run, if its session is live; both are marked as seen, at most every few seconds. Raises NotFound or Gone."""
    row = session.execute(_LIVE_RUN, {"model_id": model_id, "owner_id": owner_id}).one_or_none()
    if row is None:
        raise NotFound(f"model_id: there is no run {model_id!r}")
    if row.finished_at is not None:
        raise Gone(f"model_id: the session of {model_id!r} is finished")
    now = utc_now()
    if now - row.last_seen_at > _TOUCH_EVERY or row.silent_since is not None:
        seen = update(ClientSession).where(ClientSession.id == row.id).values(last_seen_at=now, silent_since=None)
        session.execute(seen.execution_options(synchronize_session=False))
    if now - row.last_request_at > _TOUCH_EVERY:
        asked = update(Run).where(Run.id == model_id).values(last_request_at=now)
        session.execute(asked.execution_options(synchronize_session=False))
    return LiveRun(row.pool, row.worker_id, row.unloaded)


def heartbeat(database: Database, owner_id: str, session_id: str) -> None:
    """Note that the client is alive. Raises NotFound or Gone."""
    with database.write() as session:
        require_live(session, owner_id, session_id)


def finish(database: Database, owner_id: str, session_id: str, request: FinishSession) -> None:
    """End a session; the first reason stays. Raises NotFound."""
    with database.write() as session:
        found = session.scalar(
            select(ClientSession.id).where(ClientSession.id == session_id, ClientSession.owner_id == owner_id)
        )
        if found is None:
            raise NotFound(f"session_id: there is no session {session_id!r}")
        session.execute(
            update(ClientSession)
            .where(ClientSession.id == session_id, ClientSession.finished_at.is_(None))
            .values(finished_at=utc_now(), finish_reason=request.reason.type, finish_detail=request.detail)
        )
