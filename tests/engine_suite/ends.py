"""Where sequences end: stop tokens, stop strings, the model's own end of sequence, max_tokens, the context."""

from __future__ import annotations

import pytest

from app.errors import InvalidRequest
from app.wire.types import PromptTargets, SampledSequence
from tests.engine_suite.models import CONTEXT, VOCAB, first_of_its_kind, greedy, prompt
from tests.engine_suite.rig import Asked, Outcomes, Rig, ask


def continuation(rig: Rig, count: int = 30) -> list[int]:
    """The greedy tokens after `prompt(6)` if nothing stops them."""
    return greedy(rig.reference.models[None], prompt(6), count)


def stopped(rig: Rig, **params: object) -> SampledSequence:
    """The greedy sequence after `prompt(6)`, at most 30 tokens."""
    [sequence] = rig.sample(ask("r", prompt(6), max_tokens=30, temperature=0.0, **params)).sequences
    return sequence


def test_a_stop_token_is_included(rig: Rig) -> None:
    tokens = continuation(rig)
    end = first_of_its_kind(tokens, 1)
    sequence = stopped(rig, stop_tokens=(tokens[end], VOCAB + 3000))
    assert (sequence.stop_reason, sequence.tokens.tolist()) == ("stop", tokens[: end + 1])
    assert len(sequence.logprobs) == end + 1


def test_a_stop_token_may_be_the_first(rig: Rig) -> None:
    sequence = stopped(rig, stop_tokens=(continuation(rig)[0],))
    assert (sequence.stop_reason, len(sequence.tokens)) == ("stop", 1)


@pytest.mark.parametrize("others", [(), ("never there", "")])
def test_a_stop_string_across_tokens_is_included(rig: Rig, others: tuple[str, ...]) -> None:
    tokens = continuation(rig)
    text = rig.tokenizer.decode(tokens)
    wanted = text[4:8]
    end = next(i for i in range(len(tokens)) if wanted in rig.tokenizer.decode(tokens[: i + 1]))
    assert end >= 2, "it begins in one token and ends in a later one"
    sequence = stopped(rig, stop_strings=(*others, wanted))
    assert (sequence.stop_reason, sequence.tokens.tolist()) == ("stop", tokens[: end + 1])


def test_the_models_own_end_stops_only_where_the_request_names_no_stops(rig: Rig) -> None:
    tokens = continuation(rig)
    end = tokens.index(rig.eos)
    sequence = stopped(rig)
    assert (sequence.stop_reason, sequence.tokens.tolist()) == ("stop", tokens[: end + 1])
    for stops in ({"stop_tokens": ()}, {"stop_strings": ()}, {"stop_strings": ("never there",)}, {"stop_tokens": (0,)}):
        sequence = stopped(rig, **stops)
        assert (sequence.stop_reason, sequence.tokens.tolist()) == ("length", tokens), stops


def test_stops_are_each_sequences_own(rig: Rig) -> None:
    request = ask("r", prompt(6), max_tokens=25, num_samples=12, seed=4, stop_tokens=tuple(range(0, VOCAB, 8)))
    asked = Asked(request, "all layers")
    result = rig.sample(request, asked.who)
    rig.check(asked, result)
    for sequence in result.sequences:
        *before, last = sequence.tokens.tolist()
        assert all(token % 8 for token in before)
        assert sequence.stop_reason == ("length" if last % 8 else "stop")
        assert len(sequence.tokens) == 25 or last % 8 == 0
    assert len({len(sequence.tokens) for sequence in result.sequences}) > 1


@pytest.mark.parametrize(
    ("length", "max_tokens", "expected"),
    [(6, 4, 4), (6, 1, 1), (6, 0, 1), (CONTEXT - 5, None, 5), (CONTEXT - 5, 1000, 5), (CONTEXT - 1, None, 1)],
)
def test_length(rig: Rig, length: int, max_tokens: int | None, expected: int) -> None:
    asked = Asked(ask("r", prompt(length), max_tokens=max_tokens, stop_tokens=(), seed=1), "attention")
    result = rig.sample(asked.request, asked.who)
    [sequence] = result.sequences
    assert (sequence.stop_reason, len(sequence.tokens)) == ("length", expected)
    rig.check(asked, result)


@pytest.mark.parametrize(
    ("tokens", "options", "word"),
    [
        ([], {}, "prompt"),
        (prompt(CONTEXT + 1), {}, "context"),
        ([1, VOCAB], {}, "vocabulary"),
        ([1, -1], {}, "vocabulary"),
        ([1], {"num_samples": 0}, "num_samples"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1, 2], {"targets": PromptTargets((1, 1), [VOCAB])}, "target_prompt_logprobs"),
        ([1, 2], {"targets": PromptTargets((1, 1), [-1])}, "target_prompt_logprobs"),
    ],
)
def test_what_cannot_be_served_is_the_users_error_and_hurts_nobody(
    rig: Rig, tokens: list[int], options: dict[str, object], word: str
) -> None:
    outcomes = Outcomes()
    good = Asked(ask("good", prompt(6), max_tokens=5, temperature=0.0))
    rig.engine.submit(outcomes.job(ask("bad", tokens, **options)))  # type: ignore[arg-type]
    rig.engine.submit(outcomes.job(good.request))
    rig.finish(outcomes, 2)
    outcome = outcomes["bad"]
    assert isinstance(outcome, InvalidRequest), outcome
    assert word in outcome.detail
    rig.check(good, outcomes.result("good"))
