"""Nothing of a stop string is ever told, however the tokens fall, and nothing before it is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.compat.text import StoppingText
from tests.unit.app.compat.tokenizer_lab import ours


def told(text: str, stops: list[str], step: int = 1) -> tuple[list[str], bool]:
    tokenizer = ours("byte_level")
    tokens = tokenizer.encode(text, add_special_tokens=False)
    stopping = StoppingText(tokenizer, stops)
    pieces = [stopping.push(tokens[i : i + step]) for i in range(0, len(tokens), step)]
    return [*pieces, stopping.finish()], stopping.stopped


def cut(text: str, stops: list[str]) -> str:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


@given(
    text=st.text("abc ", max_size=40), stops=st.lists(st.text("abc ", min_size=1, max_size=4), max_size=3),
    step=st.integers(1, 4),
)  # fmt: skip
def test_the_text_ends_before_the_first_stop_string(text: str, stops: list[str], step: int) -> None:
    pieces, stopped = told(text, stops, step)
    assert "".join(pieces) == cut(text, stops)
    assert stopped == any(stop in text for stop in stops)


def test_what_may_become_a_stop_string_is_held_back_and_then_told() -> None:
    pieces, stopped = told("x\n\ny", ["\n\nz"])
    assert not stopped and "".join(pieces) == "x\n\ny"
    assert not any(piece.endswith("\n") for piece in pieces)


@pytest.mark.parametrize("stop", ["é", "你好"])
def test_a_stop_string_of_characters_of_many_bytes(stop: str) -> None:
    pieces, stopped = told(f"before {stop} after", [stop])
    assert stopped and "".join(pieces) == "before "
