"""Health and capabilities."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response
from pydantic import BaseModel
from redis.exceptions import RedisError
from sqlalchemy import text
from sqlalchemy.exc import SQLAlchemyError

from app.deps import OwnerDep, Services, ServicesDep, in_thread
from app.fleet import service
from app.responses import json_response

router = APIRouter(tags=["fleet"])

_HEALTH_TIMEOUT_S = 2.0


class SupportedModel(BaseModel):
    """A model that can be asked for by this name."""

    model_name: str
    max_context_length: int
    trainable: bool
    sampleable: bool


class Capabilities(BaseModel):
    """Answer of `get_server_capabilities`."""

    supported_models: list[SupportedModel]


def _supported(services: Services) -> list[SupportedModel]:
    with services.database.read() as session:
        roles = service.roles_by_pool(session)
        return [
            SupportedModel(
                model_name=model.name,
                max_context_length=model.context_length,
                trainable="train" in roles.get(model.pool, ()),
                sampleable="sample" in roles.get(model.pool, ()),
            )
            for model in service.served_models(session)
        ]


@router.get("/api/v1/get_server_capabilities")
async def get_server_capabilities(owner_id: OwnerDep, services: ServicesDep) -> Capabilities:
    """The base models that are served, by each of their names, and what their workers do."""
    return Capabilities(supported_models=await in_thread(_supported, services))


@router.get("/livez")
async def livez() -> dict[str, str]:
    """200 as long as this process answers."""
    return {"status": "ok"}


@router.get("/readyz")
async def readyz(services: ServicesDep) -> Response:
    """200 when this process can take requests: the database answers."""
    missing = await _database_missing(services)
    return _health(missing)


@router.get("/api/v1/healthz")
async def healthz(services: ServicesDep) -> Response:
    """200 when the database, the broker and a worker for each role of each model answer; else 503 and what lacks."""
    missing = await _database_missing(services)
    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            await services.redis.ping()
    except (RedisError, OSError, TimeoutError):
        missing.append("the broker does not answer")
    if not missing:
        missing = await in_thread(
            service.missing_roles, services.database, silence_s=services.settings.worker_silence_s
        )
    return _health(missing)


async def _database_missing(services: Services) -> list[str]:
    def ask() -> None:
        with services.database.read() as session:
            session.execute(text("SELECT 1"))

    try:
        async with asyncio.timeout(_HEALTH_TIMEOUT_S):
            await in_thread(ask)
    except (SQLAlchemyError, OSError, TimeoutError):
        return ["the database does not answer"]
    return []


def _health(missing: list[str]) -> Response:
    if missing:
        return json_response({"status": "unavailable", "missing": missing}, status_code=503)
    return json_response({"status": "ok"})
