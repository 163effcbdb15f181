"""What routes get from the application: its services, the caller's identity, a bounded body."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ParamSpec, TypeVar

import orjson
from fastapi import Depends, Request
from redis.asyncio import Redis
from starlette.concurrency import run_in_threadpool

from app.accounts.key_ring import KeyRing
from app.checkpoints.downloads import Downloads
from app.compat.service import CompatService
from app.db import Database
from app.errors import InvalidRequest, TooLarge
from app.fleet.doorbells import DoorbellPublisher
from app.futures.service import FutureService
from app.futures.waiters import Waiters
from app.rate_limit import RateLimit
from app.runs.service import RunService
from app.sampling.accepted import AcceptedSamples
from app.sampling.direct import DirectSampling
from app.sampling.futures import SampleFutures
from app.sampling.service import SamplingService
from app.sessions.traces import Traces
from app.settings import Settings
from app.shared_lookups import SharedLookups
from app.telemetry.metrics import WebMetrics
from app.wire import json_text

_MAX_JSON_BYTES = 2**25
"""Only batches are larger; in memory JSON may take twenty times its size."""
SMALL_JSON_BYTES = 2**16
"""Larger ones are parsed, and checked, away from the event loop."""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Services:
    """Everything that a request may need, made once per process."""

    settings: Settings
    database: Database
    redis: Redis
    keys: KeyRing
    doorbells: DoorbellPublisher
    runs: RunService
    downloads: Downloads
    traces: Traces
    sampling: SamplingService
    samples: SampleFutures
    accepted: AcceptedSamples
    futures: FutureService
    waiters: Waiters
    direct: DirectSampling
    compat: CompatService
    rate_limit: RateLimit
    metrics: WebMetrics
    owner_lookups: SharedLookups[str] = field(default_factory=SharedLookups)


def services_of(request: Request) -> Services:
    """The process's services."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def get_owner(request: Request) -> str:
    """The id of the caller's owner. Raises Unauthorized, and TooManyRequests."""
    return await find_owner(request, request.headers.get("x-api-key"))


async def find_owner(request: Request, secret: str | None) -> str:
    """The id of the owner of a key or token. Raises Unauthorized, and TooManyRequests."""
    services = services_of(request)
    owner_id = services.keys.remembered(secret)
    if owner_id is None:
        owner_id = await services.owner_lookups.get(secret, partial(run_in_threadpool, services.keys.look_up, secret))
    services.rate_limit.take(owner_id, request.scope["path"])
    return owner_id


async def _services(request: Request) -> Services:
    """As a coroutine: FastAPI would call a plain function in a thread."""
    return services_of(request)


ServicesDep = Annotated[Services, Depends(_services)]
OwnerDep = Annotated[str, Depends(get_owner)]


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run something that waits for the database away from the event loop."""
    return await run_in_threadpool(function, *args, **kwargs)


async def json_body(request: Request) -> Any:
    """The request's body as JSON. Raises InvalidRequest or TooLarge."""
    raw = await request.body()
    if len(raw) > _MAX_JSON_BYTES:
        raise TooLarge(f"body: JSON of more than {_MAX_JSON_BYTES} bytes")
    if len(raw) > SMALL_JSON_BYTES:
        return await in_thread(parse_json, raw)
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return await in_thread(parse_json, raw)


def parse_json(raw: bytes) -> Any:
    """JSON, perhaps with the constants of Python's clients. Raises InvalidRequest."""
    try:
        return json_text.loads(raw)
    except ValueError as error:
        raise InvalidRequest("body: not valid JSON") from error
