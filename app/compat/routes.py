"""The OpenAI-compatible routes, for clients that know no Tinker."""

from __future__ import annotations

from functools import partial

import structlog
from fastapi import APIRouter, Request, Response

from app.compat import catalogue
from app.compat.access import CompatOwnerDep
from app.compat.connection import ClientGone, Emit, EventStream, while_connected
from app.compat.errors import code_of, error_body
from app.compat.schemas import B, ChatBody, CompletionBody, parse
from app.compat.service import Asked
from app.deps import Services, ServicesDep, in_thread
from app.errors import TinworksError
from app.json_route import checked_body
from app.responses import json_response
from app.runs.openapi import json_body_of

router = APIRouter(prefix="/v1", tags=["openai"])
log = structlog.get_logger(__name__)

_CLIENT_GONE = 499
"""Nobody reads it; nginx's number for a request that its client gave up."""


@router.post("/completions", openapi_extra=json_body_of(CompletionBody))
async def completions(request: Request, owner_id: CompatOwnerDep, services: ServicesDep) -> Response:
    """Continue a text, or token ids."""
    body = await _body(request, CompletionBody)
    return await _sampled(request, services, await services.compat.completion(owner_id, body))


@router.post("/chat/completions", openapi_extra=json_body_of(ChatBody))
async def chat_completions(request: Request, owner_id: CompatOwnerDep, services: ServicesDep) -> Response:
    """Answer a conversation, in the base model's chat template."""
    body = await _body(request, ChatBody)
    return await _sampled(request, services, await services.compat.chat(owner_id, body))


@router.post("/chat/completions/render", openapi_extra=json_body_of(ChatBody))
async def render_chat(request: Request, owner_id: CompatOwnerDep, services: ServicesDep) -> Response:
    """The prompt that a chat completion would continue, as text and as tokens. Nothing is sampled."""
    body = await _body(request, ChatBody)
    rendered = await services.compat.render(owner_id, body)
    prompt = rendered.prompt
    return json_response({"model": rendered.model, "prompt": prompt.text, "token_ids": prompt.tokens})


@router.get("/models")
async def list_models(owner_id: CompatOwnerDep, services: ServicesDep) -> Response:
    """What the caller can name as `model`."""
    return json_response(
        {"object": "list", "data": await in_thread(catalogue.list_models, services.database, owner_id)}
    )


@router.get("/models/{name:path}")
async def get_model(name: str, owner_id: CompatOwnerDep, services: ServicesDep) -> Response:
    """One model, by its name or path."""
    target = await in_thread(services.direct.target, owner_id, name)
    return json_response(await in_thread(catalogue.describe, services.database, name, target))


async def _body(request: Request, kind: type[B]) -> B:
    return await checked_body(request, partial(parse, kind))


async def _sampled(request: Request, services: Services, asked: Asked) -> Response:
    compat = services.compat
    samples = await compat.submit(asked)
    if asked.body.stream:

        async def produce(emit: Emit) -> None:
            await compat.stream(asked, samples, emit)

        return EventStream(produce, _told)
    try:
        answer = await while_connected(request.receive, compat.answer(asked, samples))
    except ClientGone:
        return Response(status_code=_CLIENT_GONE)
    return Response(answer, media_type="application/json")


def _told(error: Exception) -> object:
    """The error that ends a stream."""
    if isinstance(error, TinworksError):
        return error_body(error.status, error.detail, code_of(error))
    log.error("stream_failed", exc_info=error)
    return error_body(500, "internal error; the server's log has the details")
