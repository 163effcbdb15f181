"""Training routes: each appends to a run's log, rings, and answers with a future at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastapi import APIRouter, Request, Response

from app.deps import OwnerDep, Services, ServicesDep, in_thread, json_body, parse_json
from app.errors import InvalidRequest, TooLarge
from app.json_route import StrictJsonRoute
from app.responses import json_response
from app.runs.openapi import batch_body, json_body_of
from app.runs.requests import Submitted
from app.runs.schemas import (
    CreateFromWeights,
    CreateModel,
    Future,
    GetInfo,
    Info,
    LoadWeights,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
    UnloadModel,
)
from app.wire.decompress import unpack
from app.wire.training import parse_forward_backward

router = APIRouter(prefix="/api/v1", tags=["training"], route_class=StrictJsonRoute)

_MAX_JSON_BATCH_BYTES = 2**26
"""Several times what a client puts into one request; in memory JSON may take twenty times its size."""
_PROTOBUF, _JSON = "application/x-protobuf", "application/json"


async def _accept(services: Services, owner_id: str, submit: Callable[[], Submitted]) -> Response:
    """Append to the log and ring, away from the event loop; the answer is the future."""

    def append() -> Submitted:
        submitted = submit()
        if submitted.pool is not None:
            services.doorbells.ring_train(
                kind=submitted.kind, model_id=submitted.model_id, pool=submitted.pool, worker_id=submitted.worker_id
            )
        return submitted

    submitted = await in_thread(append)
    if submitted.will_finish:
        services.waiters.expect(submitted.request_id, owner_id)
    return json_response({"request_id": submitted.request_id, "model_id": submitted.model_id})


async def _submit_json(
    request: Request, owner_id: str, services: Services, submit: Callable[[str, object], Submitted]
) -> Response:
    body = await json_body(request)
    return await _accept(services, owner_id, partial(submit, owner_id, body))


@router.post("/create_model", response_model=Future, openapi_extra=json_body_of(CreateModel))
async def create_model(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Response:
    """Create a run: a LoRA adapter over a served base model."""
    return await _submit_json(request, owner_id, services, services.runs.create)


@router.post("/get_info")
async def get_info(body: GetInfo, owner_id: OwnerDep, services: ServicesDep) -> Info:
    """What a run is, and where its tokenizer is found."""
    return await in_thread(services.runs.info, owner_id, body.model_id)


@router.post(
    "/forward_backward", response_model=Future, openapi_extra=batch_body("forward_backward_input", protobuf=True)
)
async def forward_backward(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Response:
    """Loss and gradients (or, `forward_only`, loss alone) of a batch: protobuf or, from older SDKs, JSON."""
    if _content_type(request, _PROTOBUF, _JSON) == _JSON:
        return await _submit_batch(request, owner_id, services, forward_only=False)
    submit = services.runs.forward_backward
    return await _submit_body(request, owner_id, services, lambda body: submit(owner_id, parse_forward_backward(body)))


@router.post("/forward", response_model=Future, openapi_extra=batch_body("forward_input", protobuf=False))
async def forward(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Response:
    """The loss of a batch; older SDKs ask here, newer ones ask `forward_backward` with `forward_only`."""
    _content_type(request, _JSON)
    return await _submit_batch(request, owner_id, services, forward_only=True)


async def _submit_batch(request: Request, owner_id: str, services: Services, *, forward_only: bool) -> Response:
    def submit(body: bytes) -> Submitted:
        if len(body) > _MAX_JSON_BATCH_BYTES:
            raise TooLarge(
                f"body: a batch in JSON of more than {_MAX_JSON_BATCH_BYTES} bytes; protobuf takes larger ones"
            )
        return services.runs.forward_backward_json(owner_id, parse_json(body), forward_only=forward_only)

    return await _submit_body(request, owner_id, services, submit)


async def _submit_body(
    request: Request, owner_id: str, services: Services, submit: Callable[[bytes], Submitted]
) -> Response:
    """Submit a body, perhaps zstd-compressed; it is unpacked and parsed away from the event loop."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    raw = await request.body()

    def unpacked() -> Submitted:
        return submit(unpack(raw, encoding, limit=services.settings.max_request_bytes))

    return await _accept(services, owner_id, unpacked)


def _content_type(request: Request, *known: str) -> str:
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in known:
        raise InvalidRequest(f"Content-Type: must be {' or '.join(known)}, not {content_type!r}")
    return content_type


@router.post("/optim_step", response_model=Future, openapi_extra=json_body_of(OptimStep))
async def optim_step(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Response:
    """One optimizer step on the gradients summed since the last."""
    return await _submit_json(request, owner_id, services, services.runs.optim_step)


@router.post("/save_weights", response_model=Future, openapi_extra=json_body_of(SaveWeights))
async def save_weights(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Response:
    """Save a named training checkpoint."""
    return await _submit_json(request, owner_id, services, services.runs.save_weights)


@router.post("/save_weights_for_sampler", response_model=Future, openapi_extra=json_body_of(SaveWeightsForSampler))
async def save_weights_for_sampler(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Response:
    """Save weights to sample from: named, or as a sampling session of their own."""
    return await _submit_json(request, owner_id, services, services.runs.save_weights_for_sampler)


@router.post("/save_weights_external", response_model=Future, openapi_extra=json_body_of(SaveWeightsExternal))
async def save_weights_external(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Response:
    """Save weights to be downloaded, in PEFT's layout, perhaps encrypted."""
    return await _submit_json(request, owner_id, services, services.runs.save_weights_external)


@router.post("/load_weights", response_model=Future, openapi_extra=json_body_of(LoadWeights, CreateFromWeights))
async def load_weights(request: Request, owner_id: OwnerDep, services: ServicesDep) -> Response:
    """Load a checkpoint into a run, or create a run from it."""
    return await _submit_json(request, owner_id, services, services.runs.load_weights)


@router.post("/unload_model")
async def unload_model(body: UnloadModel, owner_id: OwnerDep, services: ServicesDep) -> Future:
    """Free what a run holds, and take no more operations for it. Older SDKs ask; newer ones finish their session."""
    request_id = await in_thread(services.runs.unload, owner_id, body.model_id)
    return Future(request_id=request_id, model_id=body.model_id)
