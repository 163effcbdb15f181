"""What refers to snapshots and other blobs. Every column that names one is listed here, or it is not seen and its blob
is deleted (`workers.collector`).

A snapshot is used while a checkpoint names it, an upload brings it, a run's recovery begins with it, a load of a run
that may be replayed reads it, or a session that has not ended samples from it now and then. One that is not used is
only marked at first: who has just found it by a name has that long to refer to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import orjson
from sqlalchemy import ColumnElement, and_, delete, exists, literal_column, or_, select, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from app.checkpoints.models import Checkpoint, Snapshot, Upload
from app.db import utc_now
from app.fleet.models import Model
from app.runs.log import ACCEPTED, FAILED
from app.runs.models import Operation, Run
from app.sampling.models import SamplingSession
from app.sessions.models import ClientSession

BLOBS: Mapping[str, InstrumentedAttribute[Any]] = {
    "bodies": Operation.body_blob,
    "results": Operation.result_blob,
    "tokenizers": Model.tokenizer_blob,
}
"""The column that names the blobs of each folder."""
SNAPSHOTS = (
    Checkpoint.snapshot_id,
    Upload.snapshot_id,
    Run.recovery_snapshot_id,
    Run.sampler_snapshot_id,
    SamplingSession.snapshot_id,
)
"""The columns that name snapshots; the bodies of loads do so, too."""
_AT_ONCE = 500


def named_blobs(session: Session, folder: str, keys: Sequence[str]) -> set[str]:
    """Those of the blobs of a folder that a row names."""
    column = BLOBS[folder]
    return {key for some in _portions(keys) for key in session.scalars(select(column).where(column.in_(some)))}


def known_snapshots(session: Session, snapshot_ids: Sequence[str]) -> set[str]:
    """Those of the snapshots that have a row, and so may have files."""
    query = select(Snapshot.id)
    return {one for some in _portions(snapshot_ids) for one in session.scalars(query.where(Snapshot.id.in_(some)))}


@dataclass(frozen=True, slots=True)
class Ends:
    """A session that has been silent since `silent_before` has ended. Nobody comes back to a sampling session that has
    not been sampled from since `idle_before`."""

    silent_before: datetime
    idle_before: datetime


@dataclass(frozen=True, slots=True)
class Changes:
    """Ids of snapshots. `dead`: unused for so long that they may go."""

    used_again: list[str]
    newly_unused: list[str]
    dead: list[str]


def changed_snapshots(
    session: Session, read_blob: Callable[[str], bytes], *, unused_before: datetime, ends: Ends, limit: int
) -> Changes:
    """What has changed about which snapshots are used, and those that have been unused since before a time.

    `read_blob`: reads the bodies that are blobs.
    """
    used = _is_used(ends)
    query = (
        select(Snapshot.id, Snapshot.unused_since, used.label("used"))
        .where(
            or_(
                and_(used, Snapshot.unused_since.is_not(None)),
                and_(~used, or_(Snapshot.unused_since.is_(None), Snapshot.unused_since < unused_before)),
            )
        )
        .order_by(Snapshot.unused_since)
        .limit(limit)
    )
    rows = session.execute(query).all()
    pinned = _pinned(session, read_blob) if any(not row.used for row in rows) else set()
    again: list[str] = []
    newly: list[str] = []
    dead: list[str] = []
    for row in rows:
        if row.used or row.id in pinned:
            if row.unused_since is not None:
                again.append(row.id)
        elif row.unused_since is None:
            newly.append(row.id)
        elif row.unused_since < unused_before:
            dead.append(row.id)
    return Changes(again, newly, dead)


def retire_snapshots(session: Session, read_blob: Callable[[str], bytes], changes: Changes, *, ends: Ends) -> list[str]:
    """Note what has changed, and delete the rows of dead snapshots unless they are used after all; returns their ids:
    their files have to be deleted once this is committed."""
    for ids, since in ((changes.used_again, None), (changes.newly_unused, utc_now())):
        for some in _portions(ids):
            session.execute(update(Snapshot).where(Snapshot.id.in_(some)).values(unused_since=since))
    pinned = _pinned(session, read_blob) if changes.dead else set()
    gone: list[str] = []
    for some in _portions([one for one in changes.dead if one not in pinned]):
        query = delete(Snapshot).where(Snapshot.id.in_(some), ~_is_used(ends)).returning(Snapshot.id)
        gone += session.scalars(query.execution_options(synchronize_session=False))
    return gone


def _is_used(ends: Ends) -> ColumnElement[bool]:
    """By all but loads."""
    has_work = exists().where(Operation.model_id == Run.id, Operation.state == literal_column(f"'{ACCEPTED}'"))
    is_live = and_(
        ClientSession.finished_at.is_(None),
        or_(ClientSession.silent_since.is_(None), ClientSession.silent_since > ends.silent_before),
    )
    return or_(
        exists().where(Checkpoint.snapshot_id == Snapshot.id),
        exists().where(Upload.snapshot_id == Snapshot.id),
        exists().where(Run.id == Snapshot.model_id, Run.recovery_snapshot_id == Snapshot.id),
        exists().where(
            Run.id == Snapshot.model_id,
            Run.sampler_snapshot_id == Snapshot.id,
            ClientSession.id == Run.session_id,
            or_(is_live, has_work),
        ),
        exists().where(
            SamplingSession.snapshot_id == Snapshot.id,
            SamplingSession.follows_model_id.is_(None),
            ClientSession.id == SamplingSession.session_id,
            or_(SamplingSession.last_used_at.is_(None), SamplingSession.last_used_at > ends.idle_before),
            is_live,
        ),
    )


def _pinned(session: Session, read_blob: Callable[[str], bytes]) -> set[str]:
    """The snapshots that loads read which have not failed and are not behind their run's recovery."""
    query = select(Operation.body, Operation.body_blob).where(
        Operation.kind == literal_column("'load_weights'"),
        Operation.state != FAILED,
        or_(Operation.body.is_not(None), Operation.body_blob.is_not(None)),
    )
    pinned = set()
    for body, blob in session.execute(query):
        request: dict[str, Any] = orjson.loads((read_blob(blob) if blob else body) or b"{}")
        if (snapshot_id := request.get("snapshot_id")) is not None:
            pinned.add(str(snapshot_id))
    return pinned


def _portions(items: Collection[str]) -> Iterator[list[str]]:
    items = list(items)
    for start in range(0, len(items), _AT_ONCE):
        yield items[start : start + _AT_ONCE]
