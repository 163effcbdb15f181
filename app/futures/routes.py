"""`retrieve_future`, a long poll that never answers 5xx (WIRE §3), and `cancel_future`."""

from __future__ import annotations

import asyncio
import random
from typing import Annotated, Any

import structlog
from fastapi import APIRouter, Header, Response
from sqlalchemy.exc import SQLAlchemyError

from app.deps import OwnerDep, Services, ServicesDep
from app.errors import InvalidRequest, TinworksError
from app.futures.polls import PollerDep, hold_in_outage
from app.futures.schemas import CancelFuture, RetrieveFuture
from app.futures.service import Answer, QueueState, error_payload
from app.json_route import StrictJsonRoute
from app.responses import PayloadResponse, json_response
from app.sampling.keys import SAMPLE_MARK
from app.telemetry.context import note

router = APIRouter(prefix="/api/v1", tags=["futures"], route_class=StrictJsonRoute)
log = structlog.get_logger(__name__)

_SPREAD = 1.15
"""Polls that came together do not all end, and come again, together."""
_HOLD_AT_MOST_S = 30.0
_LAST_HOLD_S = 0.2


def _try_again(request_id: str, state: QueueState) -> Response:
    body: dict[str, Any] = {"type": "try_again", "request_id": request_id, "queue_state": state.state}
    if state.reason:
        body["queue_state_reason"] = state.reason
    return json_response(body, status_code=408)


def _answer(answer: Answer) -> Response:
    if not answer.pieces:
        return json_response({"status": "complete_metadata", "response_payload_size": answer.size})
    proto = answer.kind == "proto"
    return PayloadResponse(answer.pieces, media_type="application/x-protobuf" if proto else "application/json")


@router.post("/retrieve_future")
async def retrieve_future(
    body: RetrieveFuture, owner_id: PollerDep, services: ServicesDep, accept: Annotated[str, Header()] = ""
) -> Response:
    """The result of a future, or its failure; 408 when it is still pending after `poll_hold_s`. What samples and passes
    give is protobuf for those who accept it, else JSON.

    With `allow_metadata_only`, a result over `metadata_first_bytes` is only announced: the client makes room for it.
    """
    note(request_id=body.request_id)
    if owner_id is None:
        return await _outage(body.request_id)
    try:
        with services.waiters.waiting_for(body.request_id) as done:
            answer = None
            if not services.waiters.is_expected(body.request_id, owner_id):
                answer = await _look_up(owner_id, body, services)
            if answer is None:
                answer = await _wait(done, owner_id, body, services)
        if answer is None:
            return _try_again(body.request_id, await services.futures.queue_state(body.request_id))
        if answer.kind == "proto" and answer.pieces and "x-protobuf" not in accept:
            answer = await services.futures.as_json(body.request_id, answer)
        return _answer(answer)
    except TinworksError as error:
        if error.status < 500:
            raise
        log.warning("poll_outage", request_id=body.request_id, error=type(error).__name__)
    except (SQLAlchemyError, OSError) as error:
        log.warning("poll_outage", request_id=body.request_id, error=type(error).__name__)
    except Exception as error:  # a bug of ours: it comes again with every poll, and polls never end with a 5xx
        log.error("poll_failed", request_id=body.request_id, exc_info=error)
        return _answer(Answer.of("error", error_payload("the result cannot be told; see the server's log", "server")))
    return await _outage(body.request_id)


async def _look_up(owner_id: str, body: RetrieveFuture, services: Services) -> Answer | None:
    at_most = services.settings.metadata_first_bytes if body.allow_metadata_only else None
    answer = await services.futures.look_up(owner_id, body.request_id, at_most=at_most)
    if answer is None:
        services.waiters.expect(body.request_id, owner_id)
    return answer


async def _wait(done: asyncio.Event, owner_id: str, body: RetrieveFuture, services: Services) -> Answer | None:
    hold_s = min(_HOLD_AT_MOST_S, services.settings.poll_hold_s * random.uniform(1.0, _SPREAD))
    if services.waiters.stopping:  # the client asks again on a connection that the server has not closed yet
        await asyncio.sleep(_LAST_HOLD_S)
        return None
    deadline = asyncio.get_running_loop().time() + hold_s
    while (left_s := deadline - asyncio.get_running_loop().time()) > 0:
        try:
            async with asyncio.timeout(left_s):
                await done.wait()
        except TimeoutError:
            return None
        done.clear()
        if (answer := await _look_up(owner_id, body, services)) is not None:
            return answer
        if services.waiters.stopping:
            return None
    return None


async def _outage(request_id: str) -> Response:
    """A store is away."""
    await hold_in_outage()
    return _try_again(request_id, QueueState("active", "the service cannot reach its database for the moment"))


@router.post("/cancel_future", status_code=204)
async def cancel_future(body: CancelFuture, owner_id: OwnerDep, services: ServicesDep) -> None:
    """Stop working on a sample whose client does not want it any more. One that has ended stays as it is."""
    if SAMPLE_MARK not in body.request_id:
        raise InvalidRequest("request_id: only samples can be cancelled")
    await services.samples.cancel(owner_id, body.request_id)
