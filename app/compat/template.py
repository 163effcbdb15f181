"""Chat templates: the Jinja text of a base model, rendered as `transformers` renders it, without transformers.

A template belongs to the operator's model; what it is given comes from clients. So it runs in Jinja's immutable
sandbox, sees plain JSON only, and its output is cut off beyond a bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.errors import InvalidRequest

_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUED = "\uf8ff:here-the-final-message-ends:\uf8ff "
"""Marks the end of the message that is continued. The space at its end shows whether the template trims messages."""
_RENDERING_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


class TemplateFailed(InvalidRequest):
    """The template refuses these messages, or cannot cope with them."""


class PromptTooLong(InvalidRequest):
    """The rendered text is longer than any prompt of this model can be."""


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}`, by which templates mark what a model is trained on: only its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


class ChatTemplates:
    """The template of a model, or its templates by name. `special_tokens`: what they see as variables."""

    def __init__(
        self, source: str | Mapping[str, str] | None, special_tokens: Mapping[str, str | Sequence[str]]
    ) -> None:
        self._source = source
        self._special_tokens = special_tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
        most_characters: int,
    ) -> str:
        """The prompt of a conversation. Raises TemplateFailed, PromptTooLong, or InvalidRequest if the model has no
        template."""
        source = self._chosen(tools)
        chat = [_completed(message) for message in messages]
        if continue_final_message:
            chat[-1] = _marked(chat[-1])
        seen = {**self._special_tokens, **variables}
        seen |= {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            text = _generated(_compiled(source), seen, most_characters)
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"messages: the model's chat template refuses them: {error.message}") from error
        except _RENDERING_ERRORS as error:
            cause = f"{type(error).__name__}: {error}"[:300]
            raise TemplateFailed(f"messages: the model's chat template cannot render them ({cause})") from error
        return _cut(text, str(chat[-1]["content"])) if continue_final_message else text

    def _chosen(self, tools: object) -> str:
        if isinstance(self._source, str):
            return self._source
        named = self._source or {}
        name = "tool_use" if tools is not None and "tool_use" in named else "default"
        if name not in named:
            raise InvalidRequest("model: its tokenizer has no chat template; use /v1/completions")
        return named[name]


def _completed(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what is null, and its reasoning under each name that templates look for."""
    told = {name: value for name, value in message.items() if value is not None}
    reasoning = next((told[name] for name in _REASONING if name in told), None)
    return told if reasoning is None else {"thinking": reasoning, **told, "reasoning_content": reasoning}


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        raise InvalidRequest("continue_final_message: the last message has no text to continue")
    return {**message, "content": content + _CONTINUED}


def _cut(text: str, marked: str) -> str:
    """The rendered text up to the end of the final message, without white space there if the template trims."""
    end = text.rfind(_CONTINUED.strip())
    if end < 0 or marked.removesuffix(_CONTINUED).strip() not in text:
        raise TemplateFailed("continue_final_message: the model's chat template leaves out or changes the last message")
    return text[:end] if text.startswith(_CONTINUED, end) else text[:end].rstrip()


def _generated(template: jinja2.Template, seen: Mapping[str, Any], most_characters: int) -> str:
    pieces, characters = [], 0
    for piece in template.generate(**seen):
        pieces.append(piece)
        characters += len(piece)
        if characters > most_characters:
            raise PromptTooLong(f"messages: they make more than {most_characters} characters")
    return "".join(pieces)
