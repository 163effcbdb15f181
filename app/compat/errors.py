"""Errors as OpenAI's clients read them: every answer below `/v1/` that is no success has this shape.

{"error": {"message", "type", "param", "code"}}: `param` is the field that our texts begin with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from app.errors import InvalidRequest
from app.responses import json_response

PREFIX = "/v1/"
_PARAM = re.compile(r"([a-z][a-z_]*(?:\.[a-z_]+|\[\d+\]|\.\d+)*): ")
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


class ContextExceeded(InvalidRequest):
    """Prompt and answer do not fit into the model's context."""


def is_compat(path: str) -> bool:
    """Whether answers at this path have OpenAI's shape."""
    return path.startswith(PREFIX)


def error_body(status: int, detail: str, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    param = match[1] if status < 500 and (match := _PARAM.match(detail)) else None
    if status == 404 and param == "model":
        code = code or "model_not_found"
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": detail, "type": kind, "param": param, "code": code or _CODES.get(status)}}


def code_of(error: Exception | None) -> str | None:
    """The code that clients know an error by, where the status does not say it."""
    return "context_length_exceeded" if isinstance(error, ContextExceeded) else None


def error_response(
    status: int, detail: str, headers: Mapping[str, str] | None = None, *, error: Exception | None = None
) -> Response:
    """The answer. What other routes answer 422 is a 400 here."""
    status = 400 if status == 422 else status
    return json_response(error_body(status, detail, code_of(error)), status_code=status, headers=headers)
