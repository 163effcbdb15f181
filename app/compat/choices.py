"""One choice of an answer: from sampled tokens to the text and the scores that the client sees, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.compat.outcomes import FinishReason, Score, SequenceOutcome
from app.compat.text import StoppingText
from app.compat.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of a choice: text, and the tokens that came (their text may still be held back)."""

    text: str
    scores: Sequence[Score]


class Choice:
    """A continuation on its way. `tokens`: how many of them it has taken."""

    def __init__(self, tokenizer: ModelTokenizer, stops: Sequence[str]) -> None:
        self._ends = frozenset(tokenizer.eos_token_ids)
        self._text = StoppingText(tokenizer, stops)
        self.tokens = 0

    def take(self, scores: Sequence[Score]) -> Piece:
        """Append tokens."""
        self.tokens += len(scores)
        return Piece(self._text.push([score.token for score in scores if score.token not in self._ends]), scores)

    def finish(self, outcome: SequenceOutcome) -> tuple[Piece, FinishReason]:
        """All that has not been taken of the finished sequence, and why it ended."""
        last = self.take(outcome.scores[self.tokens :])
        text = last.text + self._text.finish()
        return Piece(text, last.scores), "stop" if self._text.stopped else outcome.finish_reason
