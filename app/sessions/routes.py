"""Client configuration, sessions, and the SDK's telemetry."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header

from app.deps import OwnerDep, ServicesDep, in_thread
from app.json_route import StrictJsonRoute
from app.sessions import service
from app.sessions.schemas import (
    ClientConfig,
    ClientVersion,
    CreateSession,
    DynamicConfig,
    FinishSession,
    Heartbeat,
    HeartbeatSeen,
    SessionCreated,
    Telemetry,
    TelemetryAccepted,
)

router = APIRouter(prefix="/api/v1", tags=["sessions"], route_class=StrictJsonRoute)


@router.post("/client/config")
async def client_config(body: ClientVersion, owner_id: OwnerDep, services: ServicesDep) -> ClientConfig:
    """What this server wants of its clients; the first request of every one."""
    settings = services.settings
    return ClientConfig(
        pjwt_auth_enabled=settings.pjwt_auth_enabled,
        parallel_fwdbwd_chunks=settings.parallel_fwdbwd_chunks,
        proto_compress_fwdbwd=settings.proto_compress_fwdbwd,
        sample_max_concurrent_requests=settings.sample_max_concurrent_requests,
        sample_use_retrieve_futures=settings.sample_use_retrieve_futures,
        sample_join_sampling_session=settings.sample_join_sampling_session,
        custom_loss_server_side=settings.custom_loss_server_side,
    )


@router.post("/client/dynamic_config")
async def client_dynamic_config(body: ClientVersion, owner_id: OwnerDep, services: ServicesDep) -> DynamicConfig:
    """What clients ask for again while they run."""
    return DynamicConfig(sample_cancel_enabled=services.settings.sample_cancel_enabled)


@router.post("/create_session")
async def create_session(
    body: CreateSession,
    owner_id: OwnerDep,
    services: ServicesDep,
    x_idempotency_key: Annotated[str | None, Header(max_length=200)] = None,
) -> SessionCreated:
    """Begin a session."""
    session_id = await in_thread(service.create_session, services.database, owner_id, body, x_idempotency_key)
    return SessionCreated(session_id=session_id)


@router.post("/session_heartbeat")
async def session_heartbeat(body: Heartbeat, owner_id: OwnerDep, services: ServicesDep) -> HeartbeatSeen:
    """Keep a session alive."""
    await in_thread(service.heartbeat, services.database, owner_id, body.session_id)
    return HeartbeatSeen()


@router.post("/sessions/{session_id}/finish")
async def finish_session(
    session_id: str, body: FinishSession, owner_id: OwnerDep, services: ServicesDep
) -> dict[str, str]:
    """End a session; the first reason stays."""
    await in_thread(service.finish, services.database, owner_id, session_id, body)
    return {}


@router.post("/telemetry")
async def telemetry(body: Telemetry, owner_id: OwnerDep) -> TelemetryAccepted:
    """Take the SDK's telemetry events; none is kept."""
    return TelemetryAccepted()
