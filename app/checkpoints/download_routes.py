"""Download routes: the URLs of a checkpoint's files, and those URLs themselves, which need no key."""

from __future__ import annotations

import re
from email.utils import format_datetime

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from app.checkpoints.downloads import ROUTE
from app.checkpoints.routes import ONE, AddressDep
from app.checkpoints.schemas import ExternalWeightsUrls
from app.deps import OwnerDep, ServicesDep, in_thread
from app.responses import json_response

router = APIRouter(tags=["checkpoints"])

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


@router.get(f"/api/v1{ONE}/external_weights_urls")
async def external_weights_urls(
    request: Request, address: AddressDep, owner_id: OwnerDep, services: ServicesDep
) -> ExternalWeightsUrls:
    """A signed URL for each file of exported weights, the caller's or published ones."""
    return await in_thread(services.downloads.external_urls, owner_id, address, str(request.base_url))


@router.get(f"/api/v1{ONE}/archive")
async def archive(request: Request, address: AddressDep, owner_id: OwnerDep, services: ServicesDep) -> Response:
    """A redirect to a tar of a checkpoint's files, for clients that download archives (WIRE §11)."""
    signed = await in_thread(services.downloads.archive_url, owner_id, address, str(request.base_url))
    headers = {"Location": signed.url, "Expires": format_datetime(signed.expires, usegmt=True)}
    return json_response(signed.model_dump(mode="json"), status_code=302, headers=headers)


@router.get(ROUTE + "/{token}/{filename}")
async def download(token: str, filename: str, request: Request, services: ServicesDep) -> Response:
    """What a signed URL leads to; a `Range` of it if one is asked for."""
    found = await run_in_threadpool(services.downloads.open, token, filename)
    size = found.content.size
    headers = {
        "Accept-Ranges": "bytes",
        "Cache-Control": "private",
        "Content-Disposition": f'attachment; filename="{found.filename}"',
        "X-Content-Type-Options": "nosniff",
    }
    part = _part(request.headers.get("range"), size)
    start, stop = part or (0, size)
    if start >= stop and part is not None:
        return Response(status_code=416, headers=headers | {"Content-Range": f"bytes */{size}"})
    if part is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return StreamingResponse(
        found.content.read(services.downloads.blobs, start, stop),
        status_code=206 if part else 200,
        headers=headers | {"Content-Length": str(stop - start)},
        media_type=found.media_type,
    )


def _part(header: str | None, size: int) -> tuple[int, int] | None:
    """The first byte asked for and the one behind the last; None for all: no range, or one of a form that a server may
    ignore (RFC 9110 §14.2). An empty one cannot be satisfied.
    """
    match = _RANGE.fullmatch(header.strip()) if header else None
    if match is None or match[0] == "bytes=-" or len(match[0]) > 60:
        return None
    first, last = match[1], match[2]
    if not first:
        return max(size - int(last), 0), size
    if last and int(last) < int(first):
        return None
    return int(first), min(int(last) + 1, size) if last else size
