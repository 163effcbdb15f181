"""Many kinds of requests that come, go and are cancelled at random get what each would have got alone."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from app.wire.types import SampleRequest
from tests.unit.workers.sample.native_lab import VOCAB, Inbox, Lab, ask, drain, prompt, sample, tokens_of
from workers.sample.engines.base import Cancelled


def some_request(rng: random.Random, name: str) -> SampleRequest:
    return ask(
        name,
        prompt(rng.choice([1, 2, 5, 17, 60, 100]), seed=rng.randint(0, 1)),
        max_tokens=rng.choice([1, 2, 5, 20, None]),
        seed=rng.randint(-5, 5),
        num_samples=rng.choice([1, 1, 2, 5]),
        temperature=rng.choice([0.0, 1.0, 0.7]),
        top_k=rng.choice([-1, -1, 5]),
        top_p=rng.choice([1.0, 0.8]),
        prompt_logprobs=rng.random() < 0.3,
        stop_tokens=tuple(rng.sample(range(VOCAB), 3)),
    )


@pytest.mark.parametrize("options", [
    {"max_rows": 64, "cache_bytes": 1 << 26}, {"max_rows": 4, "prefill_tokens": 9}, {"cache_bytes": 200_000},
])  # fmt: skip
def test_each_gets_what_it_would_get_alone(lab: Lab, options: dict[str, int]) -> None:
    rng = random.Random(repr(options))
    adapters = [None, lab.adapter(2, 1), lab.adapter(5, 2), lab.adapter(3, 3, unembed=False)]
    engine, inbox, cancelled = lab.engine(**options), Inbox(), set()
    asked = {f"r{i}": (some_request(rng, f"r{i}"), rng.choice(adapters)) for i in range(25)}
    for i, (request, adapter) in enumerate(asked.values()):
        engine.submit(inbox.job(request, adapter))
        for _ in range(rng.choice([0, 0, 1, 5])):
            engine.step()
        if rng.random() < 0.15:
            cancelled.add(f"r{rng.randint(0, i)}")
            for name in cancelled:
                engine.cancel(name)
    drain(engine)
    assert inbox.keys() == asked.keys()
    assert (engine.running, engine.waiting) == (0, 0)
    for name, (request, adapter) in asked.items():
        outcome = inbox[name]
        if isinstance(outcome, Cancelled):
            assert name in cancelled
            continue
        assert not isinstance(outcome, Exception)
        assert tokens_of(outcome) == tokens_of(sample(lab.engine(), request, adapter)), name
        for sequence in outcome.sequences:
            tokens = torch.tensor([*request.prompt, *sequence.tokens.tolist()])
            rows = torch.arange(len(request.prompt) - 1, len(tokens) - 1)
            expected = lab.logprobs(tokens.tolist(), adapter)[rows, tokens[len(request.prompt) :]]
            np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)
