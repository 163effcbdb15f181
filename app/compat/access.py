"""Who asks: OpenAI's clients send the key as a bearer token, others as X-API-Key."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from app.deps import find_owner
from app.errors import Unauthorized


async def _owner(request: Request) -> str:
    """The id of the caller's owner. Raises Unauthorized."""
    scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
    secret = bearer.strip() if scheme.lower() == "bearer" else None
    secret = secret or request.headers.get("x-api-key")
    if not secret:
        raise Unauthorized("no API key: send one as `Authorization: Bearer tml-…` or as X-API-Key")
    return await find_owner(request, secret)


CompatOwnerDep = Annotated[str, Depends(_owner)]
