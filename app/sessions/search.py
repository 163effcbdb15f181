"""The search over an owner's sessions.

What both databases compare alike (ids, projects, states, times) is asked of them. Texts and metadata are compared here,
since SQLite folds no case beyond ASCII and the two disagree on JSON: rows are read in batches until a page is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, false, func, or_, select
from sqlalchemy.orm import Session

from app.accounts.tokens import user_urn
from app.checkpoints.models import Checkpoint, Snapshot
from app.checkpoints.service import is_live
from app.db import Database
from app.paging import readable_metadata
from app.runs.models import Run
from app.sessions.catalogue_schemas import (
    Finish,
    OfClientFinished,
    SearchCursor,
    SearchSessions,
    SessionsFound,
    SessionsOfUsers,
    SessionSummary,
    Status,
    StatusQuery,
)
from app.sessions.models import ClientSession

_BATCH = 500


def search(database: Database, owner_id: str, asked: SearchSessions) -> SessionsFound:
    """A page of the owner's sessions that match, newest first."""
    if isinstance(asked.owner, SessionsOfUsers) and user_urn(owner_id) not in asked.owner.owner_urns:
        return SessionsFound(sessions=[], next_cursor=None)
    with database.read() as session:
        found = []
        for row in _candidates(session, owner_id, asked):
            if _matches(row, asked):
                found.append(row)
            if len(found) > asked.limit:
                break
        page = found[: asked.limit]
        cursor = None
        if len(found) > asked.limit:
            cursor = SearchCursor(last_created_at=page[-1].created_at, last_session_id=page[-1].id)
        return SessionsFound(sessions=_summaries(session, page), next_cursor=cursor)


def _candidates(session: Session, owner_id: str, asked: SearchSessions) -> Iterator[ClientSession]:
    chosen = [ClientSession.owner_id == owner_id]
    if asked.session_id is not None and asked.display_name is None:
        chosen.append(ClientSession.id == asked.session_id)
    if asked.project_ids is not None:
        chosen.append(func.coalesce(ClientSession.project_id, "").in_(asked.project_ids))
    if asked.statuses is not None:
        chosen.append(or_(*(_has_status(status) for status in asked.statuses)))
    newest_first = select(ClientSession).order_by(ClientSession.created_at.desc(), ClientSession.id.desc())
    after = (asked.cursor.last_created_at, asked.cursor.last_session_id) if asked.cursor else None
    while True:
        query = newest_first.where(*chosen).limit(_BATCH)
        if after is not None:
            older = ClientSession.created_at < after[0]
            query = query.where(or_(older, and_(ClientSession.created_at == after[0], ClientSession.id < after[1])))
        rows = session.scalars(query).all()
        yield from rows
        if len(rows) < _BATCH:
            return
        after = (rows[-1].created_at, rows[-1].id)


def _has_status(status: StatusQuery) -> ColumnElement[bool]:
    if isinstance(status, OfClientFinished):
        if status.reasons is not None:
            return ClientSession.finish_reason.in_(status.reasons)
        return ClientSession.finished_at.is_not(None)
    if status.type == "active":
        return and_(ClientSession.finished_at.is_(None), ClientSession.silent_since.is_(None))
    return false()


def _matches(row: ClientSession, asked: SearchSessions) -> bool:
    if asked.display_name is not None and row.id != asked.session_id:
        name = (row.display_name or "").casefold()
        if not all(word in name for word in asked.display_name.casefold().split()):
            return False
    metadata: Mapping[str, str] = (readable_metadata(row.user_metadata) or {}) if asked.user_metadata else {}
    return all(metadata.get(key) == value for key, value in asked.user_metadata.items())


def _summaries(session: Session, rows: Sequence[ClientSession]) -> list[SessionSummary]:
    made = _checkpoints_of(session, [row.id for row in rows])
    summaries = []
    for row in rows:
        count, size_bytes = made.get(row.id, (0, 0))
        summaries.append(
            SessionSummary(
                session_id=row.id,
                created_at=row.created_at,
                owner=user_urn(row.owner_id),
                project_id=row.project_id or "",
                status=_status(row),
                checkpoints_count=count,
                display_name=row.display_name,
                user_metadata=readable_metadata(row.user_metadata),
                checkpoint_storage_bytes=size_bytes,
            )
        )
    return summaries


def _status(row: ClientSession) -> Status | None:
    if row.finished_at is not None:
        reason: Any = row.finish_reason
        return Status(type="client_finished", reason=Finish(type=reason), detail=row.finish_detail)
    return Status(type="active") if row.silent_since is None else None


def _checkpoints_of(session: Session, session_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """How many checkpoints each session has made, and their size; a snapshot with two names counts once."""
    named = (
        select(Run.session_id, Checkpoint.snapshot_id, func.count().label("names"))
        .join(Run, Run.id == Checkpoint.model_id)
        .where(Run.session_id.in_(session_ids), is_live())
        .group_by(Run.session_id, Checkpoint.snapshot_id)
        .subquery()
    )
    query = (
        select(named.c.session_id, func.sum(named.c.names), func.sum(Snapshot.size_bytes))
        .join(Snapshot, Snapshot.id == named.c.snapshot_id)
        .group_by(named.c.session_id)
    )
    return {session_id: (int(count), int(size)) for session_id, count, size in session.execute(query)}
