"""Routes that read JSON as strictly as the rest of the service, wherever a body is declared as a schema.

FastAPI itself would take integers of any size and halves of characters, which pass through schemas that hold any value
and which no store, and no answer, can hold later.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

from app.deps import json_body
from app.errors import InvalidRequest, TooLarge


class StrictJsonRequest(Request):
    """A request whose JSON is parsed once, by `json_body`."""

    async def json(self) -> Any:
        """The parsed body. Raises HTTPException: FastAPI lets nothing else pass."""
        if not hasattr(self, "_strict"):
            try:
                self._strict = await json_body(self)
            except (InvalidRequest, TooLarge) as error:
                raise HTTPException(error.status, error.detail) from error
        return self._strict


class StrictJsonRoute(APIRoute):
    """`route_class` of routers whose routes declare bodies."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, with a request of our own."""
        handler = super().get_route_handler()

        async def strict(request: Request) -> Response:
            return await handler(StrictJsonRequest(request.scope, request.receive))

        return strict
