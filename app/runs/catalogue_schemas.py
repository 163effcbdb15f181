"""Bodies of the lists of runs (WIRE §2.6, §5.6)."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel

from app.checkpoints.schemas import CheckpointInfo
from app.paging import Cursor, Page, Scoped


class RunsQuery(Page, Scoped):
    """Query of `GET training_runs`."""

    project_id: str | None = None


class TrainingRun(BaseModel):
    """A run, as people see it."""

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool = True
    corrupted: bool
    lora_rank: int
    last_request_time: datetime
    last_checkpoint: CheckpointInfo | None
    last_sampler_checkpoint: CheckpointInfo | None
    user_metadata: dict[str, str] | None


class TrainingRuns(BaseModel):
    """Answer of `GET training_runs`."""

    training_runs: list[TrainingRun]
    cursor: Cursor
