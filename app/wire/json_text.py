"""JSON as Python's clients write it: NaN and Infinity are numbers there, which the JSON standard does not know."""

from __future__ import annotations

import json
from typing import Any

import orjson


def loads(raw: bytes) -> Any:
    """Parse JSON that may hold `NaN`, `Infinity` and `-Infinity`. Raises ValueError."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return _loads_with_constants(raw)


def _loads_with_constants(raw: bytes) -> Any:
    try:
        found = json.loads(raw)
        orjson.dumps(found)  # half characters, depth and integers: as strict as for everybody else
    except (RecursionError, orjson.JSONEncodeError) as error:
        raise ValueError(str(error)) from error
    return found
