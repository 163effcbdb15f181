"""What only the native engine does where a sequence ends, or cannot begin."""

from __future__ import annotations

import pytest

from app.errors import InvalidRequest
from tests.unit.workers.sample.native_lab import CONTEXT, Inbox, Lab, ask, drain, prompt, sample


@pytest.mark.parametrize(("length", "expected"), [(CONTEXT, 1), (1, CONTEXT - 1)])
def test_a_sequence_may_fill_the_context(lab: Lab, length: int, expected: int) -> None:
    [sequence] = sample(lab.engine(), ask("r", prompt(length))).sequences
    assert (sequence.stop_reason, len(sequence.tokens)) == ("length", expected)


@pytest.mark.parametrize(("tokens", "params"), [([1, 2**70], {}), ([1], {"stop_strings": ("x",)})])
def test_huge_tokens_and_stop_strings_without_a_tokenizer_are_the_users_error(
    lab: Lab, tokens: list[int], params: dict[str, object]
) -> None:
    engine, inbox = lab.engine(), Inbox()
    engine.submit(inbox.job(ask("bad", tokens, **params)))  # type: ignore[arg-type]
    drain(engine)
    assert isinstance(inbox["bad"], InvalidRequest)
