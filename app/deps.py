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
from app.db import Database
from app.errors import InvalidRequest
from app.fleet.doorbells import DoorbellPublisher
from app.futures.service import FutureService
from app.futures.waiters import Waiters
from app.runs.service import RunService
from app.sampling.accepted import AcceptedSamples
from app.sampling.futures import SampleFutures
from app.sampling.service import SamplingService
from app.settings import Settings
from app.shared_lookups import SharedLookups

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
    sampling: SamplingService
    samples: SampleFutures
    accepted: AcceptedSamples
    futures: FutureService
    waiters: Waiters
    owner_lookups: SharedLookups[str] = field(default_factory=SharedLookups)


def get_services(request: Request) -> Services:
    """The process's services."""
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


async def get_owner(request: Request) -> str:
    """The id of the caller's owner. Raises Unauthorized."""
    secret = request.headers.get("x-api-key")
    services = get_services(request)
    owner_id = services.keys.remembered(secret)
    if owner_id is not None:
        return owner_id
    return await services.owner_lookups.get(secret, partial(run_in_threadpool, services.keys.look_up, secret))


ServicesDep = Annotated[Services, Depends(get_services)]
OwnerDep = Annotated[str, Depends(get_owner)]


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run something that waits for the database away from the event loop."""
    return await run_in_threadpool(function, *args, **kwargs)


async def json_body(request: Request) -> Any:
    """The request's body as JSON. Raises InvalidRequest."""
    try:
        return orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise InvalidRequest("body: not valid JSON") from error
