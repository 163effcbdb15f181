"""The HTTP service: `uvicorn --factory app.main:create_app`."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from redis.asyncio import BlockingConnectionPool, Redis
from sqlalchemy.exc import DataError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

from app.accounts.key_ring import KeyRing
from app.accounts.routes import router as account_routes
from app.audit.routes import router as audit_routes
from app.billing.routes import router as billing_routes
from app.body_limit import BodyLimit
from app.checkpoints.download_routes import router as download_routes
from app.checkpoints.downloads import Downloads
from app.checkpoints.routes import router as checkpoint_routes
from app.compat.errors import error_response, is_compat
from app.compat.routes import router as compat_routes
from app.compat.service import CompatService
from app.compat.shelf import TokenizerShelf
from app.custom_losses.routes import router as custom_loss_routes
from app.db import Database, get_database
from app.deps import Services
from app.errors import InvalidRequest, TinworksError, Unavailable, shortened
from app.fleet.doorbells import DoorbellPublisher
from app.fleet.routes import router as fleet_routes
from app.futures.batch import router as batch_routes
from app.futures.routes import router as future_routes
from app.futures.service import FutureService
from app.futures.waiters import Listener, Waiters
from app.rate_limit import RateLimit
from app.responses import json_response
from app.runs.catalogue_routes import router as run_catalogue_routes
from app.runs.routes import router as run_routes
from app.runs.service import RunService
from app.sampling.accepted import AcceptedSamples
from app.sampling.direct import DirectSampling
from app.sampling.feeds import TOLD_CHANNEL, CompletionFeeds
from app.sampling.futures import SampleFutures
from app.sampling.router import SampleRouter
from app.sampling.routes import router as sampling_routes
from app.sampling.service import SamplingService
from app.sampling.store import Depths, SampleInbox
from app.sessions.catalogue_routes import router as session_catalogue_routes
from app.sessions.routes import router as session_routes
from app.sessions.traces import Traces
from app.settings import Settings, get_settings
from app.shutdown import before_exit
from app.storage.blobs import get_blob_store
from app.telemetry.fleet import FleetCollector
from app.telemetry.logs import configure_logs
from app.telemetry.metrics import WebMetrics
from app.telemetry.requests import MeasureRequests
from app.telemetry.routes import router as metrics_routes
from app.telemetry.traces import configure_traces

log = structlog.get_logger(__name__)

_SWITCH_INTERVAL_S = 0.0005
"""The event loop gets the GIL back from a thread that talks to the database after half a millisecond."""


def make_services(settings: Settings, database: Database) -> Services:
    """Everything that requests need, wired together."""
    redis = Redis.from_pool(
        BlockingConnectionPool.from_url(
            settings.redis_url,
            socket_connect_timeout=1.0,
            socket_timeout=5.0,
            health_check_interval=15,
            max_connections=64,
            timeout=5,
        )
    )
    subscription = Redis.from_url(settings.redis_url, socket_connect_timeout=1.0, socket_keepalive=True)
    blobs = get_blob_store()
    keys = KeyRing(database, settings)
    depths = Depths(settings.max_waiting_samples, settings.max_waiting_samples_per_tenant)
    inbox = SampleInbox(
        redis,
        depths=depths,
        result_ttl_s=settings.sample_ttl_s,
        keep_feeds=settings.sample_use_retrieve_futures,
    )
    router = SampleRouter(redis, prefix_tokens=settings.route_prefix_tokens)
    feeds = CompletionFeeds(redis)
    samples = SampleFutures(database, inbox, feeds)
    accepted = AcceptedSamples(feeds, remember=settings.sample_use_retrieve_futures)
    futures = FutureService(
        database,
        blobs,
        samples,
        worker_silence_s=settings.worker_silence_s,
        runs_per_tenant=settings.runs_per_tenant,
    )
    doorbells = DoorbellPublisher(settings)
    told = Listener(TOLD_CHANNEL, accepted.told, accepted.recover)
    waiters = Waiters(subscription, futures.find_finished, [told])
    unfed = SampleInbox(redis, depths=depths, result_ttl_s=settings.sample_ttl_s)
    direct = DirectSampling(database, redis, unfed, router, doorbells, waiters)
    return Services(
        settings=settings,
        database=database,
        redis=redis,
        keys=keys,
        doorbells=doorbells,
        runs=RunService(database, blobs, settings, keys),
        downloads=Downloads(database, blobs, settings),
        traces=Traces(database, settings),
        sampling=SamplingService(database, inbox, router),
        samples=samples,
        accepted=accepted,
        futures=futures,
        waiters=waiters,
        direct=direct,
        compat=CompatService(direct, TokenizerShelf(blobs)),
        rate_limit=RateLimit(settings.requests_per_s),
        metrics=WebMetrics(),
    )


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    services.doorbells.start()
    services.waiters.start()
    fleet = FleetCollector(services.database, services.settings)
    services.metrics.watch(
        doorbells_lost=lambda: services.doorbells.lost, polls=lambda: services.waiters.count, fleet=fleet
    )
    if services.settings.metrics_port:
        services.metrics.serve(services.settings.metrics_port)
    gc.collect()
    gc.freeze()  # what was made at start stays; collections need not look at it again and again
    with before_exit(services.waiters.release):
        yield
    await services.waiters.stop()
    await asyncio.to_thread(services.metrics.close)
    fleet.close()
    await asyncio.to_thread(services.doorbells.stop)
    await services.redis.aclose()
    services.database.dispose()


def create_app() -> FastAPI:
    """The application, configured from the environment."""
    settings = get_settings()
    configure_logs(settings)
    configure_traces(settings, "tinworks-web")
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    app = FastAPI(title="Tinworks", version="0.1.0", lifespan=_lifespan, redirect_slashes=False, docs_url="/docs")
    app.state.services = make_services(settings, get_database())
    for router in (  # matched in this order, so the busiest come first
        future_routes,
        run_routes,
        sampling_routes,
        session_routes,
        batch_routes,
        fleet_routes,
        custom_loss_routes,
        session_catalogue_routes,
        run_catalogue_routes,
        checkpoint_routes,
        download_routes,
        account_routes,
        audit_routes,
        billing_routes,
        compat_routes,
        metrics_routes,
    ):
        app.include_router(router)
    app.add_exception_handler(TinworksError, _tell)
    app.add_exception_handler(RequestValidationError, _tell_invalid)
    app.add_exception_handler(HTTPException, _tell_http)
    app.add_exception_handler(DataError, _tell_unstorable)
    for outage in (OperationalError, InterfaceError, PoolTimeout):
        app.add_exception_handler(outage, _tell_outage)
    app.add_exception_handler(Exception, _tell_bug)
    app.add_middleware(BodyLimit, limit=settings.max_request_bytes)
    app.add_middleware(MeasureRequests, metrics=app.state.services.metrics)
    return app


def _error(
    request: Request,
    status: int,
    detail: str,
    headers: dict[str, str] | None = None,
    *,
    cause: Exception | None = None,
) -> Response:
    if is_compat(request.url.path):
        return error_response(status, detail, headers, error=cause)
    return json_response({"detail": detail}, status_code=status, headers=headers)


async def _tell(request: Request, error: Exception) -> Response:
    assert isinstance(error, TinworksError)
    return _error(request, error.status, error.detail, error.headers, cause=error)


async def _tell_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    message = "unknown field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    return _error(request, 422, shortened(f"{where}: {message}"))


async def _tell_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(request, error.status_code, str(error.detail), dict(error.headers or {}))


async def _tell_unstorable(request: Request, error: Exception) -> Response:
    """Values that no schema refuses and Postgres does not take: a NUL in a text, NaN in JSON."""
    return await _tell(request, InvalidRequest("body: a value cannot be stored, like a NUL character or NaN"))


async def _tell_outage(request: Request, error: Exception) -> Response:
    log.warning("database_outage", path=request.url.path, error=type(error).__name__)
    return await _tell(request, Unavailable("the database cannot be reached; try again"))


async def _tell_bug(request: Request, error: Exception) -> Response:
    log.error("request_failed", path=request.url.path, exc_info=error)
    return _error(request, 500, "internal error; the server's log has the details")
