"""Logprobs as the two kinds of completions show them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from app.compat.outcomes import Score
from app.compat.tokenizer import ModelTokenizer

LEAST = -9999.0
"""What stands for minus infinity, which JSON does not have."""


def token_text(tokenizer: ModelTokenizer, token: int) -> str:
    """One token as a text; a part of a character is a replacement character."""
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def chat_logprobs(tokenizer: ModelTokenizer, scores: Sequence[Score], k: int) -> dict[str, Any]:
    """`logprobs` of a chat's choice: every sampled token with its bytes, and the `k` most probable ones."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        written = tokenizer.token_bytes(token)
        return {
            "token": written.decode("utf-8", "replace"),
            "logprob": _bounded(logprob),
            "bytes": list(written),
        }

    content = [
        {**entry(score.token, score.logprob), "top_logprobs": [entry(*other) for other in score.topk[:k]]}
        for score in scores
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of one choice of a completion, piece by piece. `k`: how many alternatives, besides the token itself.

    `text_offset` counts the characters of the choice's text before a token. Special tokens are not in the text.
    """

    def __init__(self, tokenizer: ModelTokenizer, k: int) -> None:
        self._tokenizer = tokenizer
        self._k = k
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of(self, scores: Sequence[Score]) -> dict[str, Any]:
        """The next tokens."""
        offsets = []
        for score in scores:
            offsets.append(self._offset)
            if score.token not in self._tokenizer.special:
                self._offset += len(self._characters.decode(self._tokenizer.token_bytes(score.token)))
        return {
            "text_offset": offsets,
            "token_logprobs": [_bounded(score.logprob) for score in scores],
            "tokens": [token_text(self._tokenizer, score.token) for score in scores],
            "top_logprobs": [self._alternatives(score) for score in scores],
        }

    def _alternatives(self, score: Score) -> dict[str, float | None] | None:
        if score.logprob is None:
            return None
        table: dict[str, float | None] = {}
        for token, logprob in [*score.topk[: self._k], (score.token, score.logprob)]:
            table.setdefault(token_text(self._tokenizer, token), _bounded(logprob))
        return table


def _bounded(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST)
