"""Answers and chunks in OpenAI's shapes. Nothing here samples or waits."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from app.compat.choices import Piece
from app.compat.logprobs import CompletionLogprobs, chat_logprobs
from app.compat.outcomes import FinishReason, Score
from app.compat.tokenizer import ModelTokenizer


@dataclass(slots=True)
class Used:
    """Tokens of a whole request."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0

    def as_json(self) -> dict[str, Any]:
        """`usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class ChoiceShape(Protocol):
    """One choice of one kind of answer."""

    def opening(self) -> dict[str, Any] | None:
        """What a stream begins with."""

    def piece(self, piece: Piece) -> dict[str, Any] | None:
        """A part of a stream; None if there is nothing to tell."""

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        """What a stream ends with."""

    def whole(self, piece: Piece, prompt: Sequence[Score], reason: FinishReason) -> dict[str, Any]:
        """All of it. `prompt`: the scores of an echoed prompt."""


class ChatChoice:
    """A chat's choice. `k`: how many alternatives per token; None: no logprobs."""

    def __init__(self, index: int, tokenizer: ModelTokenizer, k: int | None) -> None:
        self._index = index
        self._tokenizer = tokenizer
        self._k = k

    def opening(self) -> dict[str, Any] | None:
        return self._chunk({"role": "assistant", "content": "", "refusal": None}, None, None)

    def piece(self, piece: Piece) -> dict[str, Any] | None:
        logprobs = self._logprobs(piece.scores) if piece.scores else None
        return self._chunk({"content": piece.text}, logprobs, None) if piece.text or logprobs else None

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        return self._chunk({}, None, reason)

    def whole(self, piece: Piece, prompt: Sequence[Score], reason: FinishReason) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        logprobs = self._logprobs(piece.scores)
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, scores: Sequence[Score]) -> dict[str, Any] | None:
        return None if self._k is None else chat_logprobs(self._tokenizer, scores, self._k)

    def _chunk(self, delta: dict[str, Any], logprobs: object, reason: FinishReason | None) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


class CompletionChoice:
    """A completion's choice. `echo`: the prompt's text, which comes first; empty if it is not asked for."""

    def __init__(self, index: int, tokenizer: ModelTokenizer, k: int | None, echo: str) -> None:
        self._index = index
        self._logprobs = None if k is None else CompletionLogprobs(tokenizer, k)
        self._echo = echo

    def opening(self) -> dict[str, Any] | None:
        return self._choice(self._echo, None, None) if self._echo else None

    def piece(self, piece: Piece) -> dict[str, Any] | None:
        logprobs = self._of(piece.scores) if piece.scores else None
        return self._choice(piece.text, logprobs, None) if piece.text or logprobs else None

    def closing(self, reason: FinishReason) -> dict[str, Any]:
        return self._choice("", None, reason)

    def whole(self, piece: Piece, prompt: Sequence[Score], reason: FinishReason) -> dict[str, Any]:
        return self._choice(self._echo + piece.text, self._of([*prompt, *piece.scores]), reason)

    def _of(self, scores: Sequence[Score]) -> dict[str, Any] | None:
        return self._logprobs.of(scores) if self._logprobs else None

    def _choice(self, text: str, logprobs: object, reason: FinishReason | None) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What surrounds choices: the same id and time in every chunk of a stream. `kind`: a chat or a completion."""

    IDS: ClassVar[dict[str, str]] = {"chat.completion": "chatcmpl", "text_completion": "cmpl"}

    kind: str
    model: str
    suffix: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def answer(self, choices: Sequence[dict[str, Any]], used: Used) -> dict[str, Any]:
        """A whole answer."""
        return {**self._head(self.kind), "choices": choices, "usage": used.as_json()}

    def chunk(self, choices: Sequence[dict[str, Any]], **usage: object) -> dict[str, Any]:
        """A chunk of a stream."""
        kind = f"{self.kind}.chunk" if self.kind == "chat.completion" else self.kind
        return {**self._head(kind), "choices": choices, **usage}

    def _head(self, kind: str) -> dict[str, Any]:
        identity = f"{self.IDS[self.kind]}-{self.suffix}"
        head = {"id": identity, "object": kind, "created": self.created, "model": self.model}
        return {**head, "system_fingerprint": None}
