"""Runs as people see them: listed by page, with their newest checkpoints.

Of another owner's run, one who may read a published checkpoint of it sees that and what it is a checkpoint of, never
the run's metadata or its private checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from app.accounts.models import Owner
from app.checkpoints import catalogue as checkpoints
from app.checkpoints.models import Checkpoint
from app.checkpoints.service import SAMPLER, TRAINING, is_live
from app.db import Database
from app.errors import NotFound
from app.paging import AccessScope, Cursor, readable_metadata
from app.runs.catalogue_schemas import RunsQuery, TrainingRun, TrainingRuns
from app.runs.models import Run
from app.sessions.models import ClientSession


def list_runs(database: Database, owner_id: str, asked: RunsQuery) -> TrainingRuns:
    """A page of runs, newest first."""
    chosen = [_in_scope(owner_id, asked.access_scope)]
    if asked.project_id is not None:
        of_project = select(ClientSession.id).where(ClientSession.project_id == asked.project_id)
        chosen.append(Run.session_id.in_(of_project))
    query = (
        select(Run)
        .where(*chosen)
        .order_by(Run.created_at.desc(), Run.id.desc())
        .limit(asked.limit)
        .offset(asked.offset)
    )
    with database.read() as session:
        total = session.scalar(select(func.count()).select_from(Run).where(*chosen)) or 0
        runs = _describe(session, owner_id, session.scalars(query).all())
    return TrainingRuns(training_runs=runs, cursor=Cursor(offset=asked.offset, limit=asked.limit, total_count=total))


def get_run(database: Database, owner_id: str, model_id: str, scope: AccessScope) -> TrainingRun:
    """One run. Raises NotFound."""
    with database.read() as session:
        run = session.scalar(select(Run).where(Run.id == model_id, _in_scope(owner_id, scope)))
        if run is None:
            raise NotFound(f"training_run_id: there is no run {model_id!r}")
        return _describe(session, owner_id, [run])[0]


def _in_scope(owner_id: str, scope: AccessScope) -> ColumnElement[bool]:
    if scope == "owned":
        return Run.owner_id == owner_id
    published = select(Checkpoint.model_id).where(Checkpoint.public, is_live())
    return or_(Run.owner_id == owner_id, Run.id.in_(published))


def _describe(session: Session, owner_id: str, runs: Sequence[Run]) -> list[TrainingRun]:
    query = select(Owner.id, Owner.name).where(Owner.id.in_({run.owner_id for run in runs}))
    names = {row.id: row.name for row in session.execute(query)}
    newest = checkpoints.newest(session, owner_id, [run.id for run in runs])
    return [
        TrainingRun(
            training_run_id=run.id,
            base_model=run.base_model,
            model_owner=names[run.owner_id],
            corrupted=run.failed,
            lora_rank=run.lora_rank,
            last_request_time=run.last_request_at,
            last_checkpoint=newest.get((run.id, TRAINING)),
            last_sampler_checkpoint=newest.get((run.id, SAMPLER)),
            user_metadata=readable_metadata(run.user_metadata) if run.owner_id == owner_id else None,
        )
        for run in runs
    ]
