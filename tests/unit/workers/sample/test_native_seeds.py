"""A seed fixes a request's sequences, whatever else is served; without one nothing repeats."""

from __future__ import annotations

import pytest

from app.wire.types import SampleResult
from tests.unit.workers.sample.native_lab import Inbox, Lab, ask, drain, prompt, sample, serve, tokens_of


def test_a_seed_gives_the_same_tokens_again(lab: Lab) -> None:
    request = ask("r", prompt(6), max_tokens=20, seed=42, num_samples=3)
    assert tokens_of(sample(lab.engine(), request)) == tokens_of(sample(lab.engine(), request))


def test_seeded_tokens_do_not_depend_on_the_batch(lab: Lab) -> None:
    adapter = lab.adapter(3, 1)
    request = ask("r", prompt(6), max_tokens=20, seed=42, num_samples=3, top_p=0.9, temperature=1.3)
    alone = tokens_of(sample(lab.engine(), request, adapter))
    engine, inbox = lab.engine(max_rows=7), Inbox()
    for i in range(5):
        engine.submit(inbox.job(ask(f"a{i}", prompt(4 + i), max_tokens=3 * i + 1), [None, adapter][i % 2]))
        engine.step()
    engine.submit(inbox.job(request, adapter))
    for i in range(5):
        engine.submit(inbox.job(ask(f"b{i}", prompt(20 + i), max_tokens=5, top_k=4), lab.adapter(2, i)))
        engine.step()
    drain(engine)
    outcome = inbox["r"]
    assert isinstance(outcome, SampleResult)
    assert tokens_of(outcome) == alone


def test_sequences_of_a_seeded_request_differ(lab: Lab) -> None:
    result = sample(lab.engine(), ask("r", prompt(6), max_tokens=20, seed=0, num_samples=16))
    assert len({tuple(tokens) for tokens in tokens_of(result)}) == 16


def test_more_samples_extend_fewer(lab: Lab) -> None:
    few = sample(lab.engine(), ask("r", prompt(6), max_tokens=8, seed=9, num_samples=2))
    many = sample(lab.engine(max_rows=3), ask("r", prompt(6), max_tokens=8, seed=9, num_samples=8))
    assert tokens_of(many)[:2] == tokens_of(few)


def test_unseeded_requests_do_not_repeat(lab: Lab) -> None:
    got = serve(lab.engine(), [ask(str(i), prompt(6), max_tokens=20, num_samples=2) for i in range(8)])
    assert len({tuple(tokens) for result in got.values() for tokens in tokens_of(result)}) == 16


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1])
def test_any_64_bit_integer_is_a_seed(lab: Lab, seed: int) -> None:
    request = ask("r", prompt(6), max_tokens=10, seed=seed)
    assert tokens_of(sample(lab.engine(), request)) == tokens_of(sample(lab.engine(), request))


def test_different_seeds_give_different_tokens(lab: Lab) -> None:
    seeds = [*range(-8, 8), 2**63, 2**63 + 1, 2**64 - 9]
    got = serve(lab.engine(), [ask(str(seed), prompt(6), max_tokens=20, seed=seed) for seed in seeds])
    assert len({tuple(tokens_of(result)[0]) for result in got.values()}) == len(seeds)
