"""What all request schemas share."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import orjson
from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Identifier = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^/\s]+$")]
SessionSeq = Annotated[int, Field(ge=0, le=2**31 - 1)]
RunSeq = Annotated[int, Field(ge=1, le=2**31 - 1)]
_MOST_FIELDS = 256
"""No body has more, and each that we do not know is an error of its own."""


def _storable(value: dict[str, Any]) -> dict[str, Any]:
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise ValueError("its values are nested too deeply") from error
    return value


def _in_utc(time: datetime) -> datetime:
    try:
        return time.astimezone(UTC)
    except OverflowError as error:
        raise ValueError("lies beyond what can be told in UTC") from error


UtcTime = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A time with its offset, in UTC."""
JsonObject = Annotated[dict[str, Any], AfterValidator(_storable)]
"""Any JSON that an answer can carry back."""


def _one_that_is_wrong(value: Any) -> Any:
    wrong = (entry for entry in value.items() if not isinstance(entry[1], str)) if isinstance(value, dict) else ()
    return next(({key: text} for key, text in wrong), value)


T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list that is refused at its first wrong item: an error takes a thousand times the memory of what it is about."""
Texts = Annotated[dict[str, str], BeforeValidator(_one_that_is_wrong)]
"""Texts by name, refused for one wrong value only, as `Items`."""


class _Body(BaseModel):
    """A field that is null says nothing, as if it were absent (WIRE §11), unless the schema gives null a meaning by
    requiring the field."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > _MOST_FIELDS:
            raise ValueError(f"more than {_MOST_FIELDS} fields")
        if None not in data.values():
            return data
        required = {name for name, field in cls.model_fields.items() if field.is_required()}
        return {name: value for name, value in data.items() if value is not None or name in required}


class Request(_Body):
    """A request body. A field that we do not know is refused by name, never ignored."""

    model_config = ConfigDict(extra="forbid")


class LenientRequest(_Body):
    """A body that carries facts about the client and no orders; newer clients may say more."""

    model_config = ConfigDict(extra="ignore")
