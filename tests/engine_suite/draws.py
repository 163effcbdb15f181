"""What is sampled follows the distribution that the parameters ask for; a seed repeats it, and nothing else does."""

from __future__ import annotations

import numpy as np
import pytest

from app.wire.types import SamplingParams
from tests.engine_suite.distribution import assert_follows, processed
from tests.engine_suite.models import prompt
from tests.engine_suite.rig import Asked, Outcomes, Rig, ask, tokens_of

SEQUENCES = 400
REQUESTS = 5


@pytest.mark.parametrize(
    ("params", "who"),
    [
        (SamplingParams(), None),
        (SamplingParams(top_k=0, top_p=1.0), "unembedding"),
        (SamplingParams(temperature=0.5), "attention"),
        (SamplingParams(temperature=1.5, top_k=20), None),
        (SamplingParams(top_p=0.6), "all layers"),
        (SamplingParams(temperature=0.7, top_k=30, top_p=0.8), "unembedding"),
        (SamplingParams(top_k=10_000, top_p=0.05), None),
    ],
    ids=lambda p: f"T={p.temperature},k={p.top_k},p={p.top_p}" if isinstance(p, SamplingParams) else str(p),
)
@pytest.mark.parametrize("seeded", [True, False])
def test_draws_follow_the_distribution(rig: Rig, params: SamplingParams, who: str | None, seeded: bool) -> None:
    tokens = prompt(7)
    asked = [
        Asked(
            ask(
                f"r{i}",
                tokens,
                max_tokens=1,
                num_samples=SEQUENCES,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                seed=1000 + i if seeded else None,
            ),
            who,
        )
        for i in range(REQUESTS)
    ]
    drawn = np.array([tokens for result in rig.serve(asked).values() for [tokens] in tokens_of(result)])
    assert len(drawn) == SEQUENCES * REQUESTS
    assert_follows(drawn, processed(rig.reference.logprobs(tokens, who)[-1].numpy(), params))


def test_later_tokens_follow_those_before(rig: Rig) -> None:
    """Their draws are independent of earlier ones but for what the model makes of them."""
    tokens, params = prompt(7), SamplingParams(top_k=3)
    result = rig.sample(ask("r", tokens, max_tokens=4, num_samples=2000, top_k=3, seed=5, stop_tokens=()))
    drawn = np.array(tokens_of(result))
    for length in (1, 2, 3):
        for before in np.unique(drawn[:, :length], axis=0):
            after = drawn[(drawn[:, :length] == before).all(1), length]
            table = rig.reference.logprobs([*tokens, *before.tolist()])
            assert_follows(after, processed(table[-1].numpy(), params))


@pytest.mark.parametrize("temperature", [0.0, 1e-7, 5e-324])
def test_a_temperature_near_zero_is_greedy(rig: Rig, temperature: float) -> None:
    tokens = prompt(5)
    request = ask("r", tokens, max_tokens=6, temperature=temperature, num_samples=3, stop_tokens=())
    expected = rig.tokens(ask("greedy", tokens, max_tokens=6, top_k=1, stop_tokens=()))
    assert rig.tokens(request) == expected * 3


def test_a_seed_gives_the_same_tokens_again_whatever_shares_the_batch(rig: Rig) -> None:
    who = "all layers"
    options = {"max_tokens": 20, "seed": 42, "num_samples": 3, "top_p": 0.9, "temperature": 1.3, "stop_tokens": ()}
    alone = rig.tokens(ask("r", prompt(6), **options), who)  # type: ignore[arg-type]
    assert rig.tokens(ask("again", prompt(6), **options), who) == alone  # type: ignore[arg-type]
    outcomes = Outcomes()
    for i in range(5):
        rig.engine.submit(outcomes.job(ask(f"a{i}", prompt(4 + i), max_tokens=3 * i + 1)))
        rig.engine.step()
    rig.engine.submit(outcomes.job(ask("r", prompt(6), **options), rig.handles[who]))  # type: ignore[arg-type]
    for i in range(5):
        rig.engine.submit(outcomes.job(ask(f"b{i}", prompt(20 + i), max_tokens=5, top_k=4), rig.handles["attention"]))
        rig.engine.step()
    rig.finish(outcomes, 11)
    assert tokens_of(outcomes.result("r")) == alone


def test_sequences_of_a_seeded_request_differ(rig: Rig) -> None:
    tokens = rig.tokens(ask("r", prompt(6), max_tokens=20, seed=0, num_samples=16, stop_tokens=()))
    assert len({tuple(each) for each in tokens}) == 16


def test_more_samples_extend_fewer(rig: Rig) -> None:
    few = rig.tokens(ask("few", prompt(6), max_tokens=8, seed=9, num_samples=2))
    many = rig.tokens(ask("many", prompt(6), max_tokens=8, seed=9, num_samples=8))
    assert many[:2] == few


def test_unseeded_requests_do_not_repeat(rig: Rig) -> None:
    requests = [ask(str(i), prompt(6), max_tokens=20, num_samples=2, stop_tokens=()) for i in range(8)]
    got = [tokens_of(result) for result in rig.serve(requests).values()]
    got += [tokens_of(rig.sample(requests[0]))]
    assert len({tuple(tokens) for result in got for tokens in result}) == 18


def test_any_64_bit_integer_is_a_seed_and_each_another_one(rig: Rig) -> None:
    seeds = [*range(-8, 8), -(2**63), 2**63 - 1, 2**63 + 1, 2**64 - 9]
    requests = [ask(str(seed), prompt(6), max_tokens=20, seed=seed, stop_tokens=()) for seed in seeds]
    first, second = rig.serve(requests), rig.serve(requests)
    for seed in seeds:
        assert tokens_of(first[str(seed)]) == tokens_of(second[str(seed)])
    assert len({tuple(tokens_of(result)[0]) for result in first.values()}) == len(seeds)
