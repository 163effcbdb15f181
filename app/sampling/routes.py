"""Sampling routes."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from app.deps import OwnerDep, ServicesDep, in_thread
from app.json_route import StrictJsonRoute, large_body
from app.responses import json_response
from app.runs.openapi import json_body_of
from app.runs.schemas import Future
from app.sampling.schemas import (
    CreateSamplingSession,
    JoinSamplingSession,
    Sample,
    Sampler,
    SamplingSessionCreated,
    SamplingSessionJoined,
)

router = APIRouter(prefix="/api/v1", tags=["sampling"], route_class=StrictJsonRoute)


@router.post("/create_sampling_session")
async def create_sampling_session(
    body: CreateSamplingSession, owner_id: OwnerDep, services: ServicesDep
) -> SamplingSessionCreated:
    """Make a target to sample from: a base model, or a checkpoint by its path."""
    identity = await in_thread(services.sampling.create_session, owner_id, body)
    return SamplingSessionCreated(sampling_session_id=identity)


@router.post("/join_sampling_session")
async def join_sampling_session(
    body: JoinSamplingSession, owner_id: OwnerDep, services: ServicesDep
) -> SamplingSessionJoined:
    """A number for one more client of a sampling session, so that their samples' numbers never meet."""
    counter = await in_thread(services.samples.join, owner_id, body.sampling_session_id)
    return SamplingSessionJoined(client_counter=counter)


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, owner_id: OwnerDep, services: ServicesDep) -> Sampler:
    """What a sampling session samples from."""
    return await in_thread(services.sampling.sampler, owner_id, sampler_id)


@router.post("/asample", response_model=Future, openapi_extra=json_body_of(Sample))
async def asample(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Response:
    """Sample continuations of a prompt; the answer is a future, and an id for each sequence to come."""
    body = await large_body(Sample, request)
    submitted = await services.sampling.submit(owner_id, body)
    if submitted.is_new:
        services.waiters.expect(submitted.request_id, owner_id)
        services.accepted.add(submitted.request_id)
        services.doorbells.ring_sample(
            request_id=submitted.request_id, pool=submitted.pool, worker_id=submitted.worker_id
        )
    return json_response({"request_id": submitted.request_id, "sample_sequence_ids": submitted.sequence_ids})
