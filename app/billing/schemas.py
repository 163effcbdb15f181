"""Queries and answers of the `billing` routes (WIRE §2.6). Costs are null: a self-hosted service has no price list."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel

from app.paging import Query


class UsageQuery(Query):
    """Query of `billing/usage/events`: full hours in UTC."""

    starting_on: datetime
    ending_before: datetime


class StorageQuery(Query):
    """Query of `billing/usage/checkpoints/current`."""

    project_id: str | None = None


class Training(BaseModel):
    """Tokens of forward and forward_backward passes."""

    type: Literal["training"] = "training"
    token_count: int


class SamplingPrefill(BaseModel):
    """Prompt tokens; `cached`: those whose keys and values were there already."""

    type: Literal["sampling_prefill"] = "sampling_prefill"
    cached: bool
    token_count: int


class SamplingSample(BaseModel):
    """Sampled tokens."""

    type: Literal["sampling_sample"] = "sampling_sample"
    token_count: int


class Checkpoints(BaseModel):
    """Checkpoints saved."""

    type: Literal["checkpoint"] = "checkpoint"
    count: int


EventInfo = Training | SamplingPrefill | SamplingSample | Checkpoints


class UsageEvent(BaseModel):
    """What one session used of one kind in one hour."""

    bucket_start: datetime
    bucket_end: datetime
    base_model: str
    user_id: str
    user_name: str
    session_id: str
    project_id: str | None
    estimated_cost_usd: None = None
    effective_rate_usd_per_million_tokens: None = None
    effective_rate_usd_per_gigabyte_month: None = None
    event_info: EventInfo


class UsageSession(BaseModel):
    """What is known of a session that usage names."""

    user_metadata: dict[str, Any] | None


class UsageEvents(BaseModel):
    """Answer of `billing/usage/events`: by hour, then most tokens first."""

    data: list[UsageEvent]
    sessions: dict[str, UsageSession]
    cost_data_through: None = None


class StorageItem(BaseModel):
    """The checkpoints of one project."""

    project_id: str | None
    org_user_urn: str
    user_email: str
    user_name: str
    checkpoint_count: int
    size_bytes: int
    size_gigabytes: float
    estimated_monthly_cost_usd: None = None


class CheckpointStorage(BaseModel):
    """Answer of `billing/usage/checkpoints/current`."""

    effective_rate_usd_per_gigabyte_month: None = None
    data: list[StorageItem]
