"""What all polls share: a caller whose key cannot be looked up for the moment, and how to hold him (WIRE §3.4)."""

from __future__ import annotations

import asyncio
from typing import Annotated

import structlog
from fastapi import Depends, Request
from sqlalchemy.exc import SQLAlchemyError

from app.deps import get_owner

log = structlog.get_logger(__name__)

OUTAGE_HOLD_S = 2.0


async def _poller(request: Request) -> str | None:
    """The caller's owner; None when the database cannot tell. Raises Unauthorized."""
    try:
        return await get_owner(request)
    except (SQLAlchemyError, OSError) as error:
        log.warning("poll_outage", error=type(error).__name__)
        return None


PollerDep = Annotated[str | None, Depends(_poller)]


async def hold_in_outage() -> None:
    """A store is away. The client polls again at once after its answer, so that has to wait for a moment."""
    await asyncio.sleep(OUTAGE_HOLD_S)
