"""What lists share: their paging, whose things they show, and metadata as the SDK can read it (WIRE §5.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

MAX_PAGE = 1000
AccessScope = Literal["owned", "accessible"]


class Query(BaseModel):
    """A query string. A parameter that we do not know is refused by name, never ignored."""

    model_config = ConfigDict(extra="forbid")


class Scoped(Query):
    """Whose things: `owned`, or `accessible`, which adds what others have published."""

    access_scope: AccessScope = "owned"


class Page(Query):
    """A part of a list."""

    limit: int = Field(20, ge=1, le=MAX_PAGE)
    offset: int = Field(0, ge=0, le=2**31 - 1)


class Cursor(BaseModel):
    """Where a page lies in its list."""

    offset: int
    limit: int
    total_count: int


def readable_metadata(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Metadata with texts for values, which is all that the SDK reads: what is no text becomes JSON."""
    if metadata is None:
        return None
    return {key: value if isinstance(value, str) else orjson.dumps(value).decode() for key, value in metadata.items()}
