"""What all request schemas share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Identifier = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^/\s]+$")]
SessionSeq = Annotated[int, Field(ge=0, le=2**31 - 1)]
RunSeq = Annotated[int, Field(ge=1, le=2**31 - 1)]
JsonObject = dict[str, Any]


class Request(BaseModel):
    """A request body. A field that we do not know is refused by name, never ignored."""

    model_config = ConfigDict(extra="forbid")


class LenientRequest(BaseModel):
    """A body that carries facts about the client and no orders; newer clients may say more."""

    model_config = ConfigDict(extra="ignore")
