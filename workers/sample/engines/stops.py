"""When a sequence ends by itself: at a token, or at a piece of text (SEMANTICS §6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.errors import InvalidRequest
from app.wire.types import SamplingParams

Decode = Callable[[Sequence[int]], str]
"""Token ids → text, special tokens and spaces as they are."""

MAX_UNFINISHED_TOKENS = 8
"""After so many tokens, text that still ends in a replacement character is taken as it is: it is no split character."""


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends the sequences of one request. `strings` needs `decode`."""

    tokens: frozenset[int]
    strings: tuple[str, ...] = ()
    decode: Decode | None = None

    @classmethod
    def of(cls, params: SamplingParams, eos: Sequence[int], decode: Decode | None) -> StopRule:
        """The model's own `eos` where the request names nothing. Raises `InvalidRequest` for strings without a
        tokenizer."""
        if params.stop_tokens is None and params.stop_strings is None:
            return cls(frozenset(eos))
        strings = tuple(string for string in params.stop_strings or () if string)
        if strings and decode is None:
            raise InvalidRequest("stop: this model has no tokenizer, so only token ids can stop a sequence")
        return cls(frozenset(params.stop_tokens or ()), strings, decode)

    def matcher(self, prompt: Sequence[int]) -> StringMatcher | None:
        """A fresh matcher for one sequence; None if no string can stop it."""
        return StringMatcher(self.strings, self.decode, prompt[-1:]) if self.strings and self.decode else None


class StringMatcher:
    """Watches the text of one growing sequence for the first of some strings, also where it spans tokens.

    Text is decoded piecewise: a piece begins a token group before the new one, since a token's text may depend on its
    left neighbour, and counts as settled once it no longer ends within a character.
    """

    def __init__(self, strings: Sequence[str], decode: Decode, left: Sequence[int] = ()) -> None:
        self._strings = strings
        self._decode = decode
        self._keep = max(len(string) for string in strings) - 1
        self._tail = ""
        """The last characters of the settled text, one fewer than the longest string has."""
        self._left = list(left)
        """The tokens that give the next ones their context; their own text is not looked at."""
        self._fresh: list[int] = []
        """Tokens whose text is not settled."""

    def push(self, token: int) -> bool:
        """Append one token; True if a string has appeared."""
        self._fresh.append(token)
        left = self._decode(self._left) if self._left else ""
        piece = self._decode(self._left + self._fresh)[len(left) :]
        text = self._tail + piece
        if any(string in text for string in self._strings):
            return True
        if piece and (not piece.endswith("\ufffd") or len(self._fresh) >= MAX_UNFINISHED_TOKENS):
            self._tail = text[-self._keep :] if self._keep else ""
            self._left, self._fresh = self._fresh, []
        return False
