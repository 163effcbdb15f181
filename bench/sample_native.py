"""Speed of the native engine on a tiny model: `python -m bench.sample_native [--threads 1] [--profile]`.

Baseline in the same run: the bare forward of transformers, one token for the same number of rows, without a cache. It
is what no engine that calls transformers can beat; the ratio is what the engine costs on top.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from app.wire.types import LoraConfig, SampleRequest, SampleResult, SamplingParams
from workers.model.base import BaseModel
from workers.model.lora import Adapter
from workers.sample.engines.base import Job
from workers.sample.engines.native import NativeEngine


def tiny_model() -> BaseModel:
    """Hidden 128, 4 layers, vocabulary 2048, random weights, float32."""
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    return BaseModel(Qwen3ForCausalLM(config), "tiny")


def run(engine: NativeEngine, requests: list[SampleRequest], adapters: list[Adapter | None]) -> float:
    """Seconds from the first submit to the last delivery."""
    outcomes: list[SampleResult | Exception] = []
    start = time.perf_counter()
    for i, request in enumerate(requests):
        engine.submit(Job(request, adapters[i % len(adapters)], outcomes.append))
    while engine.step():
        pass
    seconds = time.perf_counter() - start
    assert len(outcomes) == len(requests)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return seconds


def requests(count: int, prompt: int, max_tokens: int, num_samples: int = 1, **params: float) -> list[SampleRequest]:
    """Requests with random prompts that nothing stops early."""
    rng = np.random.default_rng(0)
    sampling = SamplingParams(max_tokens=max_tokens, stop_tokens=(), **params)  # type: ignore[arg-type]
    return [SampleRequest(f"r{i}", rng.integers(0, 2048, prompt).tolist(), sampling, num_samples) for i in range(count)]


def best(repeat: int, call: Callable[[], float]) -> float:
    """The least of `repeat` times, after one to warm up."""
    call()
    return min(call() for _ in range(repeat))


def forward_seconds(base: BaseModel, rows: int) -> float:
    """One bare forward over `rows` rows of one token, with the unembedding."""
    tokens = torch.randint(0, 2048, (rows, 1))
    start = time.perf_counter()
    with torch.no_grad():
        for _ in range(20):
            base.lm_head(base.backbone(input_ids=tokens, use_cache=False).last_hidden_state)
    return (time.perf_counter() - start) / 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--adapters", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="profile the first case instead")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    base = tiny_model()
    engine = NativeEngine(base, eos=())
    adapters: list[Adapter | None] = [
        base.new_adapter(LoraConfig(rank=16, seed=i)) for i in range(args.adapters)
    ]  # fmt: skip
    if args.profile:
        run(engine, requests(64, 16, 32), [None])
        profile = cProfile.Profile()
        profile.runcall(run, engine, requests(64, 16, 32), [None])
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
        return
    bare = best(args.repeat, lambda: forward_seconds(base, 64))
    print(f"bare forward, 64 rows                                {bare * 1e3:8.2f} ms")
    cases: list[tuple[str, list[SampleRequest], list[Adapter | None]]] = [
        ("64 x 32 tokens, base", requests(64, 16, 32), [None]),
        (f"64 x 32 tokens, {args.adapters} adapters of rank 16", requests(64, 16, 32), adapters),
        ("64 x 32 tokens, top_p 0.9", requests(64, 16, 32, top_p=0.9), [None]),
        ("64 x 32 tokens, top_k 50", requests(64, 16, 32, top_k=50), [None]),
        ("8 x 8 samples x 32 tokens", requests(8, 16, 32, num_samples=8), [None]),
        ("256 x 32 tokens, base", requests(256, 16, 32), [None]),
        ("16 x 256 tokens, prompt 256", requests(16, 256, 256), [None]),
    ]
    for name, jobs, who in cases:
        tokens = sum(r.num_samples * (r.params.max_tokens or 0) for r in jobs)
        rows = sum(r.num_samples for r in jobs)
        seconds = best(args.repeat, lambda jobs=jobs, who=who: run(engine, jobs, who))  # type: ignore[misc]
        step = seconds / (tokens / rows)
        print(f"{name:45s} {tokens / seconds:8.0f} tok/s  {step * 1e3:6.2f} ms/step  x{step / bare:.2f} of bare")
    one = best(20 * args.repeat, lambda: run(engine, requests(1, 16, 1), [None]))
    print(f"one request of one token                             {one * 1e3:8.2f} ms")
    scored = [SampleRequest("s", r.prompt, r.params, prompt_logprobs=True) for r in requests(64, 64, 1)]
    seconds = best(args.repeat, lambda: run(engine, scored, [None]))
    print(f"64 prompts of 64 tokens scored                       {seconds * 1e3:8.2f} ms")


if __name__ == "__main__":
    main()
