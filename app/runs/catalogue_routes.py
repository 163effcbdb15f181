"""Routes that show runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from app.deps import OwnerDep, ServicesDep, in_thread
from app.paging import Scoped
from app.runs import catalogue
from app.runs.catalogue_schemas import RunsQuery, TrainingRun, TrainingRuns

router = APIRouter(prefix="/api/v1", tags=["runs"])


@router.get("/training_runs")
async def list_training_runs(
    asked: Annotated[RunsQuery, Query()], owner_id: OwnerDep, services: ServicesDep
) -> TrainingRuns:
    """Runs, newest first, perhaps of one project only."""
    return await in_thread(catalogue.list_runs, services.database, owner_id, asked)


@router.get("/training_runs/{training_run_id}")
async def get_training_run(
    training_run_id: str, asked: Annotated[Scoped, Query()], owner_id: OwnerDep, services: ServicesDep
) -> TrainingRun:
    """One run, with its newest checkpoints."""
    return await in_thread(catalogue.get_run, services.database, owner_id, training_run_id, asked.access_scope)
