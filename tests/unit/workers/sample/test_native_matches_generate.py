"""Greedy sampling equals transformers' own `generate`, whatever shares the batch."""

from __future__ import annotations

import pytest
import torch

from app.wire.types import SampleResult
from tests.unit.workers.sample.native_lab import Inbox, Lab, ask, drain, prompt, qwen, sample, serve, tokens_of


def test_prompts_of_many_lengths_side_by_side(any_lab: Lab) -> None:
    prompts = {f"p{n}": prompt(n) for n in (1, 2, 3, 7, 8, 9, 30, 61)}
    got = serve(any_lab.engine(), [ask(k, p, max_tokens=12, temperature=0.0) for k, p in prompts.items()])
    for name, tokens in prompts.items():
        assert tokens_of(got[name]) == [any_lab.greedy(tokens, 12)], name


def test_requests_that_join_and_leave_at_different_times(any_lab: Lab) -> None:
    engine, inbox = any_lab.engine(), Inbox()
    cases = [(prompt(3 + 5 * i, seed=i), 4 + (7 * i) % 11) for i in range(9)]
    adapters = [None, any_lab.adapter(4, 1), any_lab.adapter(2, 2)]
    for i, (tokens, count) in enumerate(cases):
        engine.submit(inbox.job(ask(str(i), tokens, max_tokens=count, temperature=0.0), adapters[i % 3]))
        for _ in range(2):
            engine.step()
    drain(engine)
    for i, (tokens, count) in enumerate(cases):
        outcome = inbox[str(i)]
        assert isinstance(outcome, SampleResult)
        assert tokens_of(outcome) == [any_lab.greedy(tokens, count, adapters[i % 3])], i


def test_long_prompt_in_several_passes_while_others_run(any_lab: Lab) -> None:
    engine, inbox = any_lab.engine(prefill_tokens=16), Inbox()
    short, long = prompt(5), prompt(90)
    engine.submit(inbox.job(ask("short", short, max_tokens=20, temperature=0.0)))
    engine.step()
    engine.submit(inbox.job(ask("long", long, max_tokens=20, temperature=0.0)))
    drain(engine)
    for name, tokens in {"short": short, "long": long}.items():
        outcome = inbox[name]
        assert isinstance(outcome, SampleResult)
        assert tokens_of(outcome) == [any_lab.greedy(tokens, 20)]


@pytest.mark.parametrize("options", [{"max_rows": 3}, {"cache_bytes": 1}, {"prefill_tokens": 1}])
def test_limits_change_the_order_and_not_the_tokens(lab: Lab, options: dict[str, int]) -> None:
    prompts = {f"p{n}": prompt(n) for n in (2, 5, 9, 14, 20)}
    requests = [ask(k, p, max_tokens=6, temperature=0.0, num_samples=2) for k, p in prompts.items()]
    got = serve(lab.engine(**options), requests)
    for name, tokens in prompts.items():
        assert tokens_of(got[name]) == [lab.greedy(tokens, 6)] * 2


def test_bfloat16_model_samples_from_its_own_distribution() -> None:
    lab = Lab.of(lambda: qwen().to(torch.bfloat16))
    tokens = prompt(9)
    result = sample(lab.engine(), ask("r", tokens, max_tokens=10, seed=1), lab.adapter(4, 3))
    [sequence] = result.sequences
    reference = lab.logprobs([*tokens, *sequence.tokens], lab.adapter(4, 3))
    expected = reference[torch.arange(len(tokens) - 1, len(tokens) + 9), torch.from_numpy(sequence.tokens).long()]
    assert (torch.from_numpy(sequence.logprobs) - expected).abs().mean() < 0.1
