"""Text of tokens as it grows: whole characters only, and nothing of a stop string or of what may become one.

The same classes make the text of a finished sequence, so that a stream and a plain answer are the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

BROKEN = "\ufffd"
MOST_UNSETTLED = 64
"""After so many tokens a text that still ends within a character is taken as it is: it is no character."""


class Decoder(Protocol):
    """What texts are made by: see `ModelTokenizer`."""

    special: frozenset[int]

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""


class GrowingText:
    """Decodes tokens piece by piece. What a token adds may depend on its left neighbours (spaces, bytes of one
    character), so a piece is decoded together with the settled one before it, and is settled when it ends with a whole
    character. Until then only what stands before the broken end is told."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._left: list[int] = []
        self._fresh: list[int] = []
        self._told = 0
        """Characters of the fresh piece that have been told."""

    def push(self, tokens: Sequence[int]) -> str:
        """Append tokens; the characters that are new and whole."""
        new = [token for token in tokens if token not in self._decoder.special]
        if not new:
            return ""
        self._fresh += new
        piece = self._piece()
        whole = piece.rstrip(BROKEN)
        if len(self._fresh) - len(new) >= MOST_UNSETTLED:
            whole = piece
        told, self._told = whole[self._told :], max(self._told, len(whole))
        if whole == piece and piece:
            self._left, self._fresh, self._told = self._fresh, [], 0
        return told

    def finish(self) -> str:
        """What is left: a broken end."""
        rest = self._piece()[self._told :] if self._fresh else ""
        self._left, self._fresh, self._told = [], [], 0
        return rest

    def _piece(self) -> str:
        before = self._decoder.decode(self._left) if self._left else ""
        return self._decoder.decode(self._left + self._fresh)[len(before) :]


class StoppingText:
    """A growing text that ends before the first of some strings: the one that is complete first, and of those the
    longest. `stopped`: one of them has come."""

    def __init__(self, decoder: Decoder, stops: Sequence[str]) -> None:
        self._text = GrowingText(decoder)
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """Append tokens; the new text that cannot belong to a stop string."""
        return self._tell(self._text.push(tokens), last=False)

    def finish(self) -> str:
        """What was held back."""
        return self._tell(self._text.finish(), last=True)

    def _tell(self, new: str, *, last: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        end = len(text) if last else len(text) - _longest_beginning(text, self._stops)
        self._held = text[end:]
        return text[:end]


def _longest_beginning(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of `text` are the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
