"""Bodies of the routes that show sessions (WIRE §2.2)."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, Field

from app.paging import Page, Scoped
from app.schemas import Items, Request, Texts, UtcTime

ProjectId = Annotated[str, Field(max_length=200)]
FinishedBecause = Literal["success", "errored", "interrupted"]


class SessionsQuery(Page, Scoped):
    """Query of `GET sessions`."""


class SessionIds(BaseModel):
    """Answer of `GET sessions`."""

    sessions: list[str]


class SessionInfo(BaseModel):
    """Answer of `GET sessions/{id}`. `tags`: those that the client gave (the SDK's TINKER_TAGS)."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None
    display_name: str | None
    tags: list[str]


class AssignProject(Request):
    """`PUT sessions/{id}/project`."""

    project_id: Annotated[str, Field(min_length=1, max_length=200)]


class OwnSessions(Request):
    """The caller's own sessions."""

    type: Literal["own"] = "own"


class AccessibleSessions(Request):
    """Every session that the caller may see: here, too, the caller's own."""

    type: Literal["accessible"] = "accessible"


class SessionsOfUsers(Request):
    """The sessions of the owners that these URNs name."""

    type: Literal["user"] = "user"
    owner_urns: Items[Annotated[str, Field(max_length=200)]] = Field(min_length=1, max_length=10)


SearchOwner = Annotated[OwnSessions | AccessibleSessions | SessionsOfUsers, Field(discriminator="type")]


class OfStatus(Request):
    """Sessions that run; or that were cancelled or failed as a whole, which none is here."""

    type: Literal["active", "cancelled", "failed"]


class OfClientFinished(Request):
    """Sessions whose client has said that it is done."""

    type: Literal["client_finished"]
    reasons: Items[FinishedBecause] | None = Field(None, min_length=1)


StatusQuery = Annotated[OfStatus | OfClientFinished, Field(discriminator="type")]


class SearchCursor(Request):
    """Where the next page begins."""

    last_created_at: UtcTime
    last_session_id: str = Field(max_length=200)


class SearchSessions(Request):
    """`sessions/search`. With both `session_id` and `display_name`, a session that matches either is found."""

    session_id: str | None = Field(None, max_length=200)
    project_ids: Items[ProjectId] | None = Field(None, max_length=1000)
    user_metadata: Texts = {}
    display_name: str | None = Field(None, min_length=1, max_length=200)
    owner: SearchOwner = OwnSessions()
    statuses: Items[StatusQuery] | None = Field(None, min_length=1, max_length=20)
    limit: int = Field(50, ge=1, le=200)
    cursor: SearchCursor | None = None


class Finish(BaseModel):
    """How a client's program ended."""

    type: FinishedBecause


class Status(BaseModel):
    """What became of a session; the last two only of `client_finished`."""

    type: Literal["active", "client_finished"]
    reason: Finish | None = None
    detail: str | None = None


class SessionSummary(BaseModel):
    """A session that was found. `status` is null when it has fallen silent; `project_id` is empty for none."""

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: Status | None
    checkpoints_count: int
    display_name: str | None
    user_metadata: dict[str, str] | None
    checkpoint_storage_bytes: int


class SessionsFound(BaseModel):
    """One page of a search, newest first."""

    sessions: list[SessionSummary]
    next_cursor: SearchCursor | None


class TraceExport(BaseModel):
    """Answer of `trace_export`."""

    status: Literal["ready"] = "ready"
    url: str
