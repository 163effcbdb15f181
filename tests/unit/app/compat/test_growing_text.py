"""Text that is told piece by piece is the text of the whole, with no character broken on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.compat.text import BROKEN, MOST_UNSETTLED, GrowingText
from tests.unit.app.compat.tokenizer_lab import END, hugging_face, ours

KINDS = ["byte_level", "byte_fallback"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40) | st.sampled_from(
    ["hello there", "你好 世界", "👩‍🚀🎉 naïve", " a  b ", "\n\n", "здравствуй"]
)


def pieces(kind: str, tokens: list[int], step: int = 1) -> list[str]:
    text = GrowingText(ours(kind))
    told = [text.push(tokens[i : i + step]) for i in range(0, len(tokens), step)]
    return [*told, text.finish()]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS, step=st.integers(1, 5))
def test_the_pieces_are_whole_characters_of_the_text(kind: str, text: str, step: int) -> None:
    if BROKEN in text:
        return
    tokenizer = ours(kind)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    told = pieces(kind, tokens, step)
    assert "".join(told) == tokenizer.decode(tokens)
    assert not any(BROKEN in piece for piece in told)


@given(tokens=st.lists(st.integers(0, 399), max_size=60), step=st.integers(1, 7))
def test_any_tokens_give_the_same_text_at_once_and_in_steps(tokens: list[int], step: int) -> None:
    assert "".join(pieces("byte_level", tokens, step)) == ours("byte_level").decode(tokens)


def test_a_character_of_several_tokens_is_told_when_it_is_whole() -> None:
    tokenizer = ours("byte_level")
    tokens = tokenizer.encode("a🎃", add_special_tokens=False)
    assert len(tokens) > 2, "the example must split the character"
    told = pieces("byte_level", tokens)
    assert told[0] == "a" and set(told[1:-2]) == {""} and told[-2:] == ["🎃", ""]


def test_a_broken_end_is_told_at_the_end() -> None:
    tokenizer = ours("byte_level")
    tokens = tokenizer.encode("a🎃", add_special_tokens=False)[:-1]
    *before, last = pieces("byte_level", tokens)
    assert "".join(before) == "a" and last == BROKEN


def test_endless_broken_text_is_told_in_time() -> None:
    broken = hugging_face("byte_level").convert_tokens_to_ids("ÿ")
    told = pieces("byte_level", [broken] * (4 * MOST_UNSETTLED))
    longest_silence = max(len(run) for run in "".join("x" if piece == "" else " " for piece in told).split(" "))
    assert longest_silence <= MOST_UNSETTLED
    assert "".join(told) == BROKEN * (4 * MOST_UNSETTLED)


def test_special_tokens_are_no_text() -> None:
    tokenizer = ours("byte_level")
    tokens = tokenizer.encode("hello", add_special_tokens=False)
    assert "".join(pieces("byte_level", [END, *tokens, END, 99999])) == "hello"
