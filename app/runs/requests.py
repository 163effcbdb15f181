"""What every training request has in common: parsing, its identity, the answer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from app.errors import InvalidRequest

Schema = TypeVar("Schema", bound=BaseModel)
_SECRETS = ("weights_access_token",)
"""Fields of which nothing is stored, not even a hash. A repeat may carry another one; the first was decided on."""


@dataclass(frozen=True, slots=True)
class Submitted:
    """An accepted request, and whom to ring for it. `pool` None: nobody. `will_finish`: a worker will announce its end;
    false for what has failed already, and for a repeat, which may be done.
    """

    request_id: str
    model_id: str
    kind: str
    pool: str | None
    worker_id: str | None
    will_finish: bool


def validate(schema: type[Schema], data: object) -> Schema:
    """Parse a JSON body. Raises InvalidRequest that names the first wrong field and counts the others."""
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        where = ".".join(str(part) for part in errors[0]["loc"]) or "body"
        message = errors[0]["msg"].removeprefix("Value error, ")
        if errors[0]["type"] == "extra_forbidden":
            message = "unknown field"
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise InvalidRequest(f"{where}: {message}{more}") from error


def fingerprint(data: dict[str, Any], *, without: tuple[str, ...] = ()) -> str:
    """SHA-256 over the decoded fields of a JSON request, whatever their order; no secrets. Raises InvalidRequest."""
    left_out = (*_SECRETS, *without)
    kept = {key: value for key, value in data.items() if key not in left_out and value is not None}
    try:
        return hashlib.sha256(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)).hexdigest()
    except orjson.JSONEncodeError as error:
        raise InvalidRequest("body: its values are nested too deeply") from error


def readable(data: object, text: str, number: str, least: int) -> tuple[str, int]:
    """The two fields that give a request its place in a sequence. Raises InvalidRequest if they cannot be read."""
    if not isinstance(data, dict):
        raise InvalidRequest("body: must be a JSON object")
    owner, seq = data.get(text), data.get(number)
    if not isinstance(owner, str) or not owner or len(owner) > 200 or "/" in owner:
        raise InvalidRequest(f"{text}: missing or not an id")
    if not isinstance(seq, int) or isinstance(seq, bool) or not least <= seq < 2**31:
        raise InvalidRequest(f"{number}: must be an integer of at least {least}")
    return owner, seq
