"""Stop strings are found where they first become complete, however the tokenizer cuts them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidRequest
from app.wire.types import SamplingParams
from workers.sample.engines.stops import StopRule, StringMatcher


def decode_bytes(tokens: Sequence[int]) -> str:
    """A byte-level tokenizer: token = byte."""
    return bytes(tokens).decode("utf-8", errors="replace")


def stopped_at(text: bytes, strings: Sequence[str]) -> int | None:
    matcher = StringMatcher(strings, decode_bytes)
    return next((i for i, token in enumerate(text) if matcher.push(token)), None)


@pytest.mark.parametrize(
    ("text", "strings", "at"),
    [
        ("hello world", ["o w"], 6),
        ("hello world", ["xyz"], None),
        ("aaab", ["aab"], 3),
        ("abc", ["c", "b"], 1),
        ("a\n\nb", ["\n\n"], 2),
        ("grüße", ["üß"], 5),
        ("日本語", ["本"], 5),
        ("日本語", ["本語"], 8),
        ("x", ["x"], 0),
    ],
)
def test_text_that_spans_tokens(text: str, strings: list[str], at: int | None) -> None:
    assert stopped_at(text.encode(), strings) == at


def test_invalid_bytes_do_not_hide_what_follows() -> None:
    assert stopped_at(b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xffSTOP more", ["STOP"]) == 14


ALPHABET = "ab\u00fc\u65e5\U0001f600"
STRINGS = st.lists(st.text(alphabet=ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text(alphabet=ALPHABET, max_size=30), STRINGS)
def test_equals_a_search_of_the_whole_text_after_every_token(text: str, strings: list[str]) -> None:
    data = text.encode()
    expected = None
    for end in range(1, len(data) + 1):
        if any(s in data[:end].decode("utf-8", errors="ignore") for s in strings):
            expected = end - 1
            break
    assert stopped_at(data, strings) == expected


def test_tokens_of_the_prompt_give_context_and_do_not_match() -> None:
    matcher = StringMatcher(["ab"], decode_bytes, b"a")
    assert not matcher.push(ord("b"))
    assert not matcher.push(ord("a"))
    assert matcher.push(ord("b"))


def test_what_stops_when_the_request_says_nothing_something_or_the_empty_list() -> None:
    def rule(**stops: object) -> StopRule:
        return StopRule.of(SamplingParams(**stops), (7, 8), decode_bytes)  # type: ignore[arg-type]

    assert rule().tokens == {7, 8}
    assert rule(stop_tokens=()).tokens == frozenset()
    assert rule(stop_strings=()).tokens == frozenset()
    assert rule(stop_tokens=(3,)).tokens == {3}
    assert rule(stop_strings=("x",)) == StopRule(frozenset(), ("x",), decode_bytes)


def test_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop"):
        StopRule.of(SamplingParams(stop_strings=("x",)), (), None)
