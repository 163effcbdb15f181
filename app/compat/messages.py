"""Chat messages as clients send them, and as chat templates want them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import Field, ModelWrapValidatorHandler, PrivateAttr, StringConstraints, model_validator

from app.errors import InvalidRequest
from app.schemas import Items, JsonObject, Request

_Name = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class _AsItCame(Request):
    """Checked, and kept as the client wrote it: templates print some of it, where the order of keys shows."""

    _raw: JsonObject = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, data: Any, check: ModelWrapValidatorHandler[Self]) -> Self:
        checked = check(data)
        checked._raw = data
        return checked

    @property
    def raw(self) -> JsonObject:
        """What the client sent."""
        return self._raw


class TextPart(Request):
    """A piece of a message's text; other kinds of pieces are refused."""

    type: Literal["text"]
    text: str


class CalledFunction(Request):
    """What an assistant called. `arguments`: a JSON object as a text, or as it is."""

    name: _Name
    arguments: str | JsonObject = "{}"


class ToolCall(Request):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class Message(_AsItCame):
    """One message. What is null says nothing, as in an assistant's message that is sent back as it came."""

    role: _Name
    content: str | Items[TextPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: None = None
    function_call: None = None
    audio: None = None
    annotations: None = None


class FunctionSpec(Request):
    """A function that the model may call."""

    name: _Name
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(_AsItCame):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: FunctionSpec


Tools = Annotated[Items[Tool], Field(max_length=512)]


def for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages in the form that templates are written for: texts in one piece (pieces become lines), arguments of calls
    as objects. Raises InvalidRequest."""
    return [_plain(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain(message: Message, where: str) -> dict[str, Any]:
    plain = {name: value for name, value in message.raw.items() if value is not None}
    if isinstance(message.content, list):
        plain["content"] = "\n".join(part.text for part in message.content)
    if message.tool_calls:
        calls = enumerate(plain["tool_calls"])
        plain["tool_calls"] = [_called(call, f"{where}.tool_calls[{i}]") for i, call in calls]
    return plain


def _called(call: JsonObject, where: str) -> JsonObject:
    function = call["function"]
    parsed = {**function, "arguments": _arguments(function.get("arguments"), where)}
    return {"type": "function", **call, "function": parsed}


def _arguments(arguments: object, where: str) -> object:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{where}.function.arguments: not valid JSON") from error
    if not isinstance(parsed, dict):
        raise InvalidRequest(f"{where}.function.arguments: must be a JSON object")
    return parsed
