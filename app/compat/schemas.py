"""Bodies of the OpenAI-compatible routes. What is not here is refused by name; what OpenAI knows and this server cannot
do is accepted with its neutral value only (`NEUTRAL`), so that clients that send their defaults are served."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, SkipValidation, StringConstraints, ValidationError, field_validator, model_validator

from app.compat.messages import Message, Tools
from app.errors import InvalidRequest
from app.schemas import Items, JsonObject, Request

MOST_SEQUENCES = 1024
"""Prompts of one request, times `n`."""

NEUTRAL: dict[str, tuple[object, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "modalities": (["text"],),
}
"""Fields that have only these values here, besides null."""
_KEPT = {"tool_choice"}
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
_Stop = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
B = TypeVar("B", bound="SamplingBody")


class StreamOptions(Request):
    """`stream_options`."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class SamplingBody(Request):
    """What both kinds of completions have in common."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=600)]
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, lt=2**31)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: _Stop | Annotated[Items[_Stop], Field(max_length=16)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="after")
    def _streams_if_it_says_how(self) -> SamplingBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with what was used."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(SamplingBody):
    """`/v1/completions`."""

    prompt: SkipValidation[str | list[str] | list[int] | list[list[int]]]
    best_of: int | None = None
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)

    @field_validator("prompt", mode="before")
    @classmethod
    def _is_prompt(cls, prompt: Any) -> Any:
        several = prompt if isinstance(prompt, list) and prompt else [None]
        if isinstance(prompt, str) or _are_tokens(several) or all(isinstance(one, str) for one in several):
            return prompt
        if all(isinstance(one, list) and _are_tokens(one) for one in several):
            return prompt
        raise ValueError("must be a text, a list of texts, token ids, or a list of lists of token ids")

    @model_validator(mode="after")
    def _possible(self) -> CompletionBody:
        if self.best_of not in (None, self.n):
            raise ValueError("best_of: must be equal to n; this server does not choose among samples")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens: must be at least 1, unless echo asks for the prompt")
        if self.stream and self.echo and self.logprobs is not None:
            raise ValueError("echo: with logprobs it cannot be streamed")
        if len(self.prompts) * self.n > MOST_SEQUENCES:
            raise ValueError(f"prompt: more than {MOST_SEQUENCES} sequences in one request")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, each a text or token ids."""
        if isinstance(self.prompt, str) or not self.prompt or isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)


class ChatBody(SamplingBody):
    """`/v1/chat/completions`."""

    messages: Items[Message] = Field(min_length=1, max_length=2048)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto"] = "auto"
    parallel_tool_calls: bool = True
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: JsonObject = Field(default_factory=dict)

    @model_validator(mode="after")
    def _possible(self) -> ChatBody:
        if self.max_tokens == 0:
            raise ValueError("max_tokens: must be at least 1")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens: differs from max_completion_tokens; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: not together with add_generation_prompt")
        for name in sorted(_RESERVED & self.chat_template_kwargs.keys()):
            raise ValueError(f"chat_template_kwargs.{name}: is given by the request itself")
        return self

    @property
    def limit(self) -> int | None:
        """The most tokens of the answer; None: the rest of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _are_tokens(items: list[Any]) -> bool:
    return all(type(item) is int and 0 <= item < 2**31 for item in items)


def parse(kind: type[B], body: Any) -> B:
    """A request body. Raises InvalidRequest, naming the field."""
    if not isinstance(body, dict):
        raise InvalidRequest("body: must be a JSON object")
    for name, allowed in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in allowed:
            values = " or ".join(repr(value) for value in allowed)
            raise InvalidRequest(f"{name}: not supported by this server, except {values}")
    try:
        return kind.model_validate(
            {name: value for name, value in body.items() if name in _KEPT or name not in NEUTRAL}
        )
    except ValidationError as error:
        raise InvalidRequest(_first(error)) from error


def _first(error: ValidationError) -> str:
    first = max(error.errors(include_url=False, include_input=False), key=lambda found: len(found["loc"]))
    message = "unknown field" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
    where = _place(first["loc"])
    return f"{where}: {message}" if where else message


def _place(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content` of pydantic's path, without the names of a union's members."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "TextPart"):
            place += f".{part}" if place else part
    return place
