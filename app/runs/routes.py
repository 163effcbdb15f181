"""Training routes: each appends to a run's log, rings, and answers with a future at once."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Request

from app.deps import OwnerDep, Services, ServicesDep, in_thread, json_body
from app.errors import InvalidRequest
from app.runs.requests import Submitted
from app.runs.schemas import Future, GetInfo, Info
from app.wire.decompress import unpack
from app.wire.training import parse_forward_backward

router = APIRouter(prefix="/api/v1", tags=["training"])


def _accept(services: Services, owner_id: str, submitted: Submitted) -> Future:
    if submitted.will_finish:
        services.waiters.expect(submitted.request_id, owner_id)
    if submitted.pool is not None:
        services.doorbells.ring_train(
            kind=submitted.kind, model_id=submitted.model_id, pool=submitted.pool, worker_id=submitted.worker_id
        )
    return Future(request_id=submitted.request_id, model_id=submitted.model_id)


async def _submit_json(
    request: Request, owner_id: str, services: Services, submit: Callable[[str, object], Submitted]
) -> Future:
    body = await json_body(request)
    return _accept(services, owner_id, await in_thread(submit, owner_id, body))


@router.post("/create_model")
async def create_model(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Future:
    """Create a run: a LoRA adapter over a served base model."""
    return await _submit_json(request, owner_id, services, services.runs.create)


@router.post("/get_info")
async def get_info(body: GetInfo, owner_id: OwnerDep, services: ServicesDep) -> Info:
    """What a run is, and where its tokenizer is found."""
    return await in_thread(services.runs.info, owner_id, body.model_id)


@router.post("/forward_backward")
async def forward_backward(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Future:
    """Loss and gradients (or, `forward_only`, loss alone) of a batch; a protobuf body, perhaps zstd-compressed."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if content_type != "application/x-protobuf":
        raise InvalidRequest(f"Content-Type: must be application/x-protobuf, not {content_type!r}")
    encoding = request.headers.get("content-encoding", "").strip().lower()
    raw = await request.body()

    def submit() -> Submitted:
        body = unpack(raw, encoding, limit=services.settings.max_request_bytes)
        return services.runs.forward_backward(owner_id, parse_forward_backward(body))

    return _accept(services, owner_id, await in_thread(submit))


@router.post("/optim_step")
async def optim_step(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Future:
    """One optimizer step on the gradients summed since the last."""
    return await _submit_json(request, owner_id, services, services.runs.optim_step)


@router.post("/save_weights")
async def save_weights(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Future:
    """Save a named training checkpoint."""
    return await _submit_json(request, owner_id, services, services.runs.save_weights)


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Future:
    """Save weights to sample from: named, or as a sampling session of their own."""
    return await _submit_json(request, owner_id, services, services.runs.save_weights_for_sampler)


@router.post("/load_weights")
async def load_weights(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Future:
    """Load a checkpoint into a run, or create a run from it."""
    return await _submit_json(request, owner_id, services, services.runs.load_weights)
