"""JSON answers with a Content-Length, never compressed (WIRE §0.11)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response


def json_response(content: Any, *, status_code: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`content` as JSON."""
    return Response(orjson.dumps(content), status_code=status_code, headers=headers, media_type="application/json")
