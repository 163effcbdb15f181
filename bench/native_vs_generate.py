"""The native engine against `generate` of transformers, which has the same model in the same process.

    python bench/native_vs_generate.py [--model FOLDER] [--pairs 10] [--requests 64] [--tokens 32] [--threads 1]

Without --model, the tiny model that `tinworks up` makes. Both sides sample at temperature 1, prompts of 16 tokens, and
take turns. Prints how many times as fast the engine is, with the 95 % interval and the bar:

one-by-one    against one call for each request (of the first 8; the engine has all)
padded        against one call for all requests, which never waits for anybody: what the engine spends on letting
              requests come and go, and on logprobs, `generate` does not have
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
from loops import model_of
from pairs import Ratio, timed
from transformers import PreTrainedModel

from app.wire.types import SampleRequest, SampleResult, SamplingParams
from workers.model.base import BaseModel
from workers.sample.engines.base import Job
from workers.sample.engines.native import NativeEngine

PROMPT_TOKENS = 16
ONE_BY_ONE = 8
BARS = {"one-by-one": 4.0, "padded": 0.8}


@dataclass(frozen=True)
class Load:
    """So many requests, so many tokens each."""

    requests: int = 64
    tokens: int = 32

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random ones, the same each time."""
        return np.random.default_rng(0).integers(0, vocab_size, (self.requests, PROMPT_TOKENS)).tolist()


def engine_step(engine: NativeEngine, prompts: list[list[int]], tokens: int) -> Callable[[], None]:
    """All prompts through the engine."""
    params = SamplingParams(max_tokens=tokens, stop_tokens=())

    def step() -> None:
        outcomes: list[SampleResult | Exception] = []
        for i, prompt in enumerate(prompts):
            engine.submit(Job(SampleRequest(f"r{i}", prompt, params), None, outcomes.append))
        while engine.step():
            pass
        assert len(outcomes) == len(prompts)
        assert all(isinstance(outcome, SampleResult) for outcome in outcomes)

    return step


def generate_step(model: PreTrainedModel, prompts: list[list[int]], tokens: int, batch: int) -> Callable[[], None]:
    """The same through `generate`, `batch` prompts in each call."""

    @torch.no_grad()
    def step() -> None:
        for start in range(0, len(prompts), batch):
            ids = torch.tensor(prompts[start : start + batch])
            out = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=True,
                top_k=0,
                eos_token_id=model.config.vocab_size,  # none
                pad_token_id=0,
            )
            assert out.shape == (len(ids), PROMPT_TOKENS + tokens)

    return step


def native_ratios(model: PreTrainedModel, load: Load, pairs: int) -> Iterator[tuple[str, Ratio]]:
    """By the names of `BARS`."""
    plain = copy.deepcopy(model).eval()
    base = BaseModel(model, "bench")
    engine = NativeEngine(base, eos=())
    prompts = load.prompts(base.facts.vocab_size)
    few = prompts[:ONE_BY_ONE]
    ours = engine_step(engine, prompts, load.tokens)
    one_by_one = timed(ours, generate_step(plain, few, load.tokens, 1), pairs)
    share = len(prompts) / len(few)
    yield "one-by-one", one_by_one.scaled(share)
    yield "padded", timed(ours, generate_step(plain, prompts, load.tokens, len(prompts)), pairs)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load = Load(options.requests, options.tokens)
    print(f"threads={options.threads} requests={load.requests} tokens={load.tokens} pairs={options.pairs}")
    for name, found in native_ratios(model_of(options.model), load, options.pairs):
        speed = load.requests * load.tokens / found.ours * 1e3
        print(f"{name:12} {found}  bar {BARS[name]}  the engine {speed:.0f} tokens/s")


if __name__ == "__main__":
    main()
