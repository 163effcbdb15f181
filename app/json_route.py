"""Routes that read JSON as strictly as the rest of the service, wherever a body is declared as a schema.

FastAPI itself would take integers of any size and halves of characters, which pass through schemas that hold any value
and which no store, and no answer, can hold later.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from app.deps import SMALL_JSON_BYTES, in_thread, json_body
from app.errors import InvalidRequest, TooLarge

Schema = TypeVar("Schema", bound=BaseModel)
T = TypeVar("T")


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


async def checked_body(request: Request, check: Callable[[Any], T]) -> T:
    """What `check` makes of a JSON body; both away from the event loop if the body is large."""
    data = await json_body(request)
    if len(await request.body()) > SMALL_JSON_BYTES:
        return await in_thread(check, data)
    return check(data)


async def large_body(schema: type[Schema], request: Request) -> Schema:
    """A body that may be large. Errors are as those of declared bodies."""
    return await checked_body(request, partial(_checked, schema))


def _checked(schema: type[Schema], data: Any) -> Schema:
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from error
