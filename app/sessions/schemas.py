"""Bodies of the session and client routes (WIRE §2.1, §2.2)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from app.schemas import Identifier, Items, JsonObject, LenientRequest, Request


class ClientVersion(LenientRequest):
    """What a client says of itself when it asks for its configuration."""

    sdk_version: str = ""


class CreateSession(Request):
    """`create_session`."""

    tags: Items[str] = []
    user_metadata: JsonObject | None = None
    sdk_version: str = Field("", max_length=64)
    project_id: str | None = Field(None, max_length=200)
    display_name: str | None = Field(None, max_length=200)
    type: Literal["create_session"] = "create_session"


class SessionCreated(BaseModel):
    """Answer of `create_session`."""

    type: Literal["create_session"] = "create_session"
    session_id: str
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None


class Heartbeat(Request):
    """`session_heartbeat`."""

    session_id: Identifier
    type: Literal["session_heartbeat"] = "session_heartbeat"


class HeartbeatSeen(BaseModel):
    """Answer of `session_heartbeat`."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class FinishReason(Request):
    """How the client's program ended."""

    type: Literal["success", "errored", "interrupted"]


class FinishSession(Request):
    """`sessions/{id}/finish`."""

    reason: FinishReason
    detail: str | None = Field(None, max_length=10_000)


class ClientConfig(BaseModel):
    """What the server wants of its clients (WIRE §2.1)."""

    pjwt_auth_enabled: bool
    parallel_fwdbwd_chunks: bool
    proto_compress_fwdbwd: bool
    sample_max_concurrent_requests: int
    sample_use_retrieve_futures: bool
    sample_join_sampling_session: bool
    custom_loss_server_side: bool
    create_model_via_load_weights: bool = True
    """SDKs from 0.24 to 0.36 ask whether a run may begin as a checkpoint; later ones take it for granted."""


class DynamicConfig(BaseModel):
    """What clients ask for again while they run."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool
    sample_cancel_max_batch_size: int = 64


class Telemetry(LenientRequest):
    """A batch of the SDK's own events."""

    events: Items[dict[str, Any]] = []
    session_id: str = ""


class TelemetryAccepted(BaseModel):
    """Answer of `telemetry`."""

    status: Literal["accepted"] = "accepted"
