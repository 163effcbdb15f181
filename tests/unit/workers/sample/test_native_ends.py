"""Where sequences end: stop tokens, stop strings, the model's own end of sequence, max_tokens, the context."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from app.errors import InvalidRequest
from tests.unit.workers.sample.native_lab import CONTEXT, Inbox, Lab, ask, drain, prompt, sample, serve


def decode(tokens: Sequence[int]) -> str:
    return "".join(chr(ord("A") + token % 26) for token in tokens)


def greedy(lab: Lab, count: int = 30) -> list[int]:
    return lab.greedy(prompt(6), count)


def first_of_its_kind(tokens: list[int], at_least: int = 3) -> int:
    return next(i for i in range(at_least, len(tokens)) if tokens[i] not in tokens[:i])


def test_stop_token_is_included(lab: Lab) -> None:
    tokens = greedy(lab)
    end = first_of_its_kind(tokens)
    request = ask("r", prompt(6), max_tokens=30, temperature=0.0, stop_tokens=(tokens[end], 5000))
    [sequence] = sample(lab.engine(), request).sequences
    assert sequence.stop_reason == "stop"
    assert sequence.tokens.tolist() == tokens[: end + 1]
    assert len(sequence.logprobs) == end + 1


def test_stop_token_may_be_the_first(lab: Lab) -> None:
    request = ask("r", prompt(6), temperature=0.0, stop_tokens=(greedy(lab)[0],))
    [sequence] = sample(lab.engine(), request).sequences
    assert (sequence.stop_reason, len(sequence.tokens)) == ("stop", 1)


def test_stop_string_across_tokens(lab: Lab) -> None:
    tokens = greedy(lab)
    text = decode(tokens)
    wanted = text[3:6]
    end = text.index(wanted) + 3
    request = ask("r", prompt(6), max_tokens=30, temperature=0.0, stop_strings=(wanted,))
    [sequence] = sample(lab.engine(decode=decode), request).sequences
    assert sequence.stop_reason == "stop"
    assert sequence.tokens.tolist() == tokens[:end]


def test_eos_stops_only_where_the_request_names_no_stops(lab: Lab) -> None:
    tokens = greedy(lab)
    end = first_of_its_kind(tokens)
    requests = [
        ask("default", prompt(6), max_tokens=30, temperature=0.0),
        ask("nothing", prompt(6), max_tokens=30, temperature=0.0, stop_tokens=()),
        ask("string", prompt(6), max_tokens=30, temperature=0.0, stop_strings=("never there",)),
    ]
    got = serve(lab.engine(eos=(tokens[end],), decode=decode), requests)
    assert got["default"].sequences[0].tokens.tolist() == tokens[: end + 1]
    assert got["default"].sequences[0].stop_reason == "stop"
    for name in ("nothing", "string"):
        assert got[name].sequences[0].tokens.tolist() == tokens
        assert got[name].sequences[0].stop_reason == "length"


@pytest.mark.parametrize(("length", "max_tokens", "expected"), [
    (6, 4, 4), (6, 1, 1), (6, 0, 1), (CONTEXT - 5, None, 5), (CONTEXT - 5, 1000, 5), (CONTEXT - 1, None, 1),
    (CONTEXT, None, 1), (1, None, CONTEXT - 1),
])  # fmt: skip
def test_length(lab: Lab, length: int, max_tokens: int | None, expected: int) -> None:
    [sequence] = sample(lab.engine(), ask("r", prompt(length), max_tokens=max_tokens)).sequences
    assert (sequence.stop_reason, len(sequence.tokens)) == ("length", expected)


@pytest.mark.parametrize(
    ("tokens", "params", "word"),
    [
        ([], {}, "prompt"),
        (prompt(CONTEXT + 1), {}, "context"),
        ([1, 5000], {}, "vocabulary"),
        ([1, -1], {}, "vocabulary"),
        ([1, 2**70], {}, ""),
        ([1], {"num_samples": 0}, "num_samples"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"stop_strings": ("x",)}, "stop"),
    ],
)
def test_what_cannot_be_served_is_the_users_error_and_hurts_nobody(
    lab: Lab, tokens: list[int], params: dict[str, object], word: str
) -> None:
    engine, inbox = lab.engine(), Inbox()
    engine.submit(inbox.job(ask("bad", tokens, **params)))
    engine.submit(inbox.job(ask("good", prompt(6), max_tokens=5, temperature=0.0)))
    drain(engine)
    outcome = inbox["bad"]
    assert isinstance(outcome, InvalidRequest)
    assert word in outcome.detail
    good = inbox["good"]
    assert not isinstance(good, Exception)
    assert good.sequences[0].tokens.tolist() == greedy(lab, 5)
