"""Usage as its owner sees it: by the hour, and the checkpoints that are stored now."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import func, select

from app.accounts.models import Owner
from app.accounts.tokens import user_urn
from app.billing import schemas
from app.billing.models import Usage
from app.checkpoints.models import Checkpoint, Snapshot
from app.checkpoints.service import is_live
from app.db import Database, utc_now
from app.errors import InvalidRequest
from app.paging import readable_metadata
from app.runs.models import Run
from app.sessions.models import ClientSession

_HOUR = timedelta(hours=1)
_LONGEST = timedelta(days=14)
_GIGABYTE = 10**9


def usage_window(starting_on: datetime, ending_before: datetime) -> tuple[datetime, datetime]:
    """The window in UTC (a time without a zone is taken for UTC). Raises InvalidRequest, naming the field."""
    start, end = _hour("starting_on", starting_on), _hour("ending_before", ending_before)
    if start > utc_now():
        raise InvalidRequest("starting_on: must not be in the future")
    if not start < end <= start + _LONGEST:
        raise InvalidRequest("ending_before: must be after starting_on, by at most 14 days")
    return start, end


def _hour(field: str, moment: datetime) -> datetime:
    try:
        moment = moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC)
    except OverflowError as error:
        raise InvalidRequest(f"{field}: there is no such time in UTC") from error
    if moment.minute or moment.second or moment.microsecond:
        raise InvalidRequest(f"{field}: must be a full hour in UTC")
    return moment


def usage_events(database: Database, owner_id: str, start: datetime, end: datetime) -> schemas.UsageEvents:
    """What the owner used in the hours that begin in [start, end)."""
    query = (
        select(Usage, ClientSession.project_id, ClientSession.user_metadata)
        .outerjoin(ClientSession, ClientSession.id == Usage.session_id)
        .where(Usage.owner_id == owner_id, Usage.hour >= start, Usage.hour < end)
        .order_by(Usage.hour, Usage.amount.desc(), Usage.session_id, Usage.base_model, Usage.kind)
    )
    with database.read() as session:
        name = session.get_one(Owner, owner_id).name
        rows = session.execute(query).all()
    events, sessions = [], {}
    for usage, project_id, metadata in rows:
        if usage.session_id:  # a sample over the OpenAI-compatible routes has none
            sessions[usage.session_id] = schemas.UsageSession(user_metadata=readable_metadata(metadata))
        events.append(
            schemas.UsageEvent(
                bucket_start=usage.hour,
                bucket_end=usage.hour + _HOUR,
                base_model=usage.base_model,
                user_id=user_urn(owner_id),
                user_name=name,
                session_id=usage.session_id,
                project_id=project_id,
                event_info=_info(usage),
            )
        )
    return schemas.UsageEvents(data=events, sessions=sessions)


def _info(usage: Usage) -> schemas.EventInfo:
    if usage.kind == "training":
        return schemas.Training(token_count=usage.amount)
    if usage.kind == "sample":
        return schemas.SamplingSample(token_count=usage.amount)
    if usage.kind == "checkpoint":
        return schemas.Checkpoints(count=usage.amount)
    return schemas.SamplingPrefill(cached=usage.kind == "prefill_cached", token_count=usage.amount)


def checkpoint_storage(database: Database, owner_id: str, project_id: str | None) -> schemas.CheckpointStorage:
    """The owner's checkpoints by project, or those of one project; a blob that has several names counts once."""
    named = (
        select(ClientSession.project_id, Snapshot.size_bytes, func.count().label("names"))
        .select_from(Checkpoint)
        .join(Snapshot, Snapshot.id == Checkpoint.snapshot_id)
        .join(Run, Run.id == Checkpoint.model_id)
        .join(ClientSession, ClientSession.id == Run.session_id)
        .where(Checkpoint.owner_id == owner_id, is_live())
        .group_by(ClientSession.project_id, Snapshot.id, Snapshot.size_bytes)
    )
    if project_id is not None:
        named = named.where(ClientSession.project_id == project_id)
    each = named.subquery()
    query = (
        select(each.c.project_id, func.sum(each.c.names), func.sum(each.c.size_bytes))
        .group_by(each.c.project_id)
        .order_by(each.c.project_id)
    )
    with database.read() as session:
        name = session.get_one(Owner, owner_id).name
        rows = session.execute(query).all()
    return schemas.CheckpointStorage(
        data=[
            schemas.StorageItem(
                project_id=project,
                org_user_urn=user_urn(owner_id),
                user_email=name,
                user_name=name,
                checkpoint_count=int(count),
                size_bytes=int(size),
                size_gigabytes=int(size) / _GIGABYTE,
            )
            for project, count, size in rows
        ]
    )
