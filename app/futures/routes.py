"""`retrieve_future`: a long poll that never answers 5xx (WIRE §3)."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field
from sqlalchemy.exc import SQLAlchemyError

from app import schemas
from app.deps import ServicesDep, get_owner
from app.errors import TinworksError
from app.futures.service import Answer, QueueState
from app.responses import json_response

router = APIRouter(prefix="/api/v1", tags=["futures"])
log = structlog.get_logger(__name__)

_OUTAGE_HOLD_S = 2.0


class RetrieveFuture(schemas.Request):
    """`retrieve_future`."""

    request_id: str = Field(max_length=300, pattern=r"^[^\s\x00]+$")
    allow_metadata_only: bool = False


def _try_again(request_id: str, state: QueueState) -> Response:
    body: dict[str, Any] = {"type": "try_again", "request_id": request_id, "queue_state": state.state}
    if state.reason:
        body["queue_state_reason"] = state.reason
    return json_response(body, status_code=408)


def _answer(answer: Answer) -> Response:
    proto = answer.kind == "proto"
    return Response(answer.payload, media_type="application/x-protobuf" if proto else "application/json")


async def _poller(request: Request) -> str | None:
    """The caller's owner; None when the database cannot tell. Raises Unauthorized."""
    try:
        return await get_owner(request)
    except (SQLAlchemyError, OSError) as error:
        log.warning("poll_outage", error=type(error).__name__)
        return None


@router.post("/retrieve_future")
async def retrieve_future(
    body: RetrieveFuture, owner_id: Annotated[str | None, Depends(_poller)], services: ServicesDep
) -> Response:
    """The result of a future, or its failure; 408 when it is still pending after `poll_hold_s`."""
    if owner_id is None:
        return await _outage(body.request_id)
    try:
        with services.waiters.waiting_for(body.request_id) as done:
            answer = None
            if not services.waiters.is_expected(body.request_id, owner_id):
                answer = await services.futures.look_up(owner_id, body.request_id)
            if answer is None:
                answer = await _wait(done, owner_id, body.request_id, services)
        if answer is not None:
            return _answer(answer)
        return _try_again(body.request_id, await services.futures.queue_state(body.request_id))
    except TinworksError as error:
        if error.status < 500:
            raise
        log.warning("poll_outage", request_id=body.request_id, error=type(error).__name__)
    except (SQLAlchemyError, OSError) as error:
        log.warning("poll_outage", request_id=body.request_id, error=type(error).__name__)
    return await _outage(body.request_id)


async def _wait(done: asyncio.Event, owner_id: str, request_id: str, services: ServicesDep) -> Answer | None:
    deadline = asyncio.get_running_loop().time() + services.settings.poll_hold_s
    while (left_s := deadline - asyncio.get_running_loop().time()) > 0:
        try:
            async with asyncio.timeout(left_s):
                await done.wait()
        except TimeoutError:
            return None
        done.clear()
        if (answer := await services.futures.look_up(owner_id, request_id)) is not None:
            return answer
        if services.waiters.stopping:
            return None
    return None


async def _outage(request_id: str) -> Response:
    """A store is away. The client polls again at once after a 5xx, so hold it for a moment and answer 408."""
    await asyncio.sleep(_OUTAGE_HOLD_S)
    return _try_again(request_id, QueueState("active", "the service cannot reach its database for the moment"))
