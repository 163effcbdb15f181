"""Bodies of the routes of futures (WIRE §3)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from app.sampling.keys import SEQUENCES_PER_CLIENT
from app.schemas import Identifier, Items, Request


class RetrieveFuture(Request):
    """`retrieve_future`."""

    request_id: str = Field(max_length=300, pattern=r"^[^\s\x00]+$")
    allow_metadata_only: bool = False


class CancelFuture(Request):
    """`cancel_future`."""

    request_id: str = Field(max_length=300, pattern=r"^[^\s\x00]+$")


class FuturesTarget(Request):
    """Whose completions: those of one client of a sampling session."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: Identifier
    cloned_sampler_id: int = Field(0, ge=0, lt=2**63 // SEQUENCES_PER_CLIENT + 1)


class RetrieveFutures(Request):
    """`retrieve_futures`."""

    target: FuturesTarget
    prev_cursor: int = Field(0, ge=0, lt=2**63)
    timeout: float | None = Field(None, ge=0, allow_inf_nan=False)
    retrieved_request_ids: Items[str] = []


class FutureFinished(BaseModel):
    """A request that has a result."""

    state: Literal["finished"] = "finished"
    request_id: str
    response_payload_uncompressed_size: int


class FutureFailed(BaseModel):
    """A request that failed, or is not known any more: `retrieve_future` says which."""

    state: Literal["failed"] = "failed"
    request_id: str


class FuturesRetrieved(BaseModel):
    """Answer of `retrieve_futures`."""

    completions: list[FutureFinished | FutureFailed]
    cursor: int
