"""`retrieve_futures`: one poll for all samples of a client (WIRE §3.5).

It never answers 5xx, and 404 only where nothing could ever come: a client that gets one gives all its samples up.
"""

from __future__ import annotations

import asyncio

import structlog
from fastapi import APIRouter, Response
from sqlalchemy.exc import SQLAlchemyError

from app.deps import Services, ServicesDep
from app.errors import TinworksError
from app.futures.polls import PollerDep, hold_in_outage
from app.futures.schemas import FutureFailed, FutureFinished, FuturesRetrieved, RetrieveFutures
from app.json_route import StrictJsonRoute
from app.responses import json_response
from app.sampling.feeds import Completion

router = APIRouter(prefix="/api/v1", tags=["futures"], route_class=StrictJsonRoute)
log = structlog.get_logger(__name__)


@router.post("/retrieve_futures", response_model=FuturesRetrieved)
async def retrieve_futures(body: RetrieveFutures, owner_id: PollerDep, services: ServicesDep) -> Response:
    """What has ended of a client's samples since `prev_cursor`; held while there is nothing to tell."""
    if owner_id is not None:
        try:
            return _answer(*await _news(body, owner_id, services))
        except TinworksError as error:
            if error.status < 500:
                raise
            log.warning("poll_outage", error=type(error).__name__)
        except (SQLAlchemyError, OSError) as error:
            log.warning("poll_outage", error=type(error).__name__)
    await hold_in_outage()
    return json_response({"detail": "the service cannot reach its stores for the moment; ask again"}, status_code=408)


async def _news(body: RetrieveFutures, owner_id: str, services: Services) -> tuple[list[Completion], int]:
    session_id = body.target.sampling_session_id
    feed = await services.samples.feed(owner_id, session_id, body.target.cloned_sampler_id)
    await services.samples.delivered(session_id, body.retrieved_request_ids)
    longest_s = services.settings.poll_hold_s
    deadline = asyncio.get_running_loop().time() + min(longest_s if body.timeout is None else body.timeout, longest_s)
    with services.waiters.waiting_for(feed) as changed:
        while True:
            changed.clear()
            completions, cursor = await services.samples.read_feed(feed, body.prev_cursor)
            left_s = deadline - asyncio.get_running_loop().time()
            if completions or left_s <= 0 or services.waiters.stopping:
                return completions, cursor
            try:
                async with asyncio.timeout(left_s):
                    await changed.wait()
            except TimeoutError:
                return [], cursor


def _answer(completions: list[Completion], cursor: int) -> Response:
    told = [
        FutureFailed(request_id=each.request_id)
        if each.size is None
        else FutureFinished(request_id=each.request_id, response_payload_uncompressed_size=each.size)
        for each in completions
    ]
    return json_response(FuturesRetrieved(completions=told, cursor=cursor).model_dump())
