"""Sampling through the SDK against the engine alone.

    python bench/sample_vs_vllm.py --vllm-python VENV/bin/python --model FOLDER [--pairs 8] [--only NAME …]

The whole service runs, with its sample worker in vLLM's environment, and beside it, in a process of its own, the same
vLLM started in the same way without anything around it. They take turns with bursts of 64 requests of 32 tokens after
random prompts of 16. Prints our tokens/s as a share of the other's, with the 95 % interval and the bar:

model-base       the model of --model (without it: left out)
model-adapters   the same, two adapters in turn
tiny-base        the tiny model that `tinworks up` makes, where the SDK itself takes most of the time
tiny-latency     milliseconds that one sample of one token takes longer than in the engine alone (p50)
native-sdk       the tiny model in the native engine through the SDK: tokens/s alone count
one-by-one, padded   see native_vs_generate.py

Without --vllm-python, the native lines only.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tinker
import torch
from fleet import RANK, WAIT_S, Fleet, fleet
from loops import model_of
from native_vs_generate import BARS as NATIVE_BARS
from native_vs_generate import Load, native_ratios
from pairs import Ratio, timed
from raw_vllm import Burst, RawVllm
from tinker import types

BARS = {"model-base": 0.95, "model-adapters": 0.95, "tiny-base": 0.35}
TOKENS_PER_SECOND = {"tiny-base": 2500, "native-sdk": 2500}
LATENCY_MS = 10.0
GROUPS = {
    "model": ("model-base", "model-adapters"),
    "tiny": ("tiny-base", "tiny-latency"),
    "native-sdk": ("native-sdk",),
    "native": ("one-by-one", "padded"),
}
"""Lines that share processes."""
ADAPTERS = 2
LATENCY_SAMPLES = 10
"""Of one pair's side: their median is its time."""


@dataclass(frozen=True)
class Size:
    """Of a burst, and how many pairs of them."""

    requests: int
    tokens: int
    pairs: int


class Sides:
    """Both sides with the same work, each time other prompts."""

    def __init__(self, size: Size, vocab_size: int) -> None:
        self._size = size
        self._vocab_size = vocab_size
        self._seeds = itertools.count(1)

    def sdk(self, samplers: Sequence[tinker.SamplingClient]) -> Callable[[], None]:
        """A burst through the SDK."""

        def burst() -> None:
            through_sdk(samplers, Burst(self._size.requests, self._size.tokens, next(self._seeds)), self._vocab_size)

        return burst

    def raw(self, vllm: RawVllm, folders: Sequence[Path] = ()) -> Callable[[], None]:
        """A burst in the engine alone."""
        adapters = [str(folder) for folder in folders]
        return lambda: vllm.run(Burst(self._size.requests, self._size.tokens, next(self._seeds), adapters)) and None

    def latencies(self, sampler: tinker.SamplingClient, vllm: RawVllm) -> tuple[float, float]:
        """Milliseconds of one sample of one token: medians of ours and theirs, taken in turn."""
        ours, theirs = [], []
        for _ in range(LATENCY_SAMPLES * self._size.pairs):
            start = time.perf_counter()
            through_sdk([sampler], Burst(1, 1, next(self._seeds)), self._vocab_size)
            ours.append(1e3 * (time.perf_counter() - start))
            theirs.append(1e3 * vllm.run(Burst(1, 1, next(self._seeds))))
        return float(np.median(ours)), float(np.median(theirs))


def through_sdk(samplers: Sequence[tinker.SamplingClient], burst: Burst, vocab_size: int) -> None:
    """All requests at once, and all answers."""
    params = types.SamplingParams(max_tokens=burst.tokens, temperature=1.0, stop=[])
    futures = [
        samplers[i % len(samplers)].sample(types.ModelInput.from_ints(prompt), 1, params)
        for i, prompt in enumerate(burst.prompts(vocab_size))
    ]
    for future in futures:
        [sequence] = future.result(WAIT_S).sequences
        assert len(sequence.tokens) == burst.tokens


def show(name: str, found: Ratio, size: Size) -> None:
    """One line of a ratio."""
    ours, theirs = (size.requests * size.tokens / ms * 1e3 for ms in (found.ours, found.theirs))
    speed = f", {TOKENS_PER_SECOND[name]} tokens/s" if name in TOKENS_PER_SECOND else ""
    print(f"{name:15} {found}  bar {BARS[name]}{speed}  ours {ours:.0f} tokens/s, against {theirs:.0f}", flush=True)


def vllm_lines(only: Sequence[str], model: Path | None, python: Path, size: Size, threads: int) -> None:
    """The lines of one model, the service and the bare engine side by side."""
    environment = vllm_environment(threads)
    with fleet(model=model, sampler_python=python, environment=environment) as service:
        with RawVllm(python, service.model, service.environment) as vllm:
            sides = Sides(size, vocab_size_of(service))
            base = service.base_sampler()
            adapters, folders = service.adapter_samplers(ADAPTERS) if "model-adapters" in only else ([], [])
            service.stop_training()
            for name in only:
                if name == "tiny-latency":
                    ours, theirs = sides.latencies(base, vllm)
                    line = f"{ours - theirs:.1f} ms  bar {LATENCY_MS} ms  ours {ours:.1f} ms, against {theirs:.1f} ms"
                    print(f"{name:15} {line}", flush=True)
                elif name == "model-adapters":
                    show(name, timed(sides.sdk(adapters), sides.raw(vllm, folders), size.pairs), size)
                else:
                    show(name, timed(sides.sdk([base]), sides.raw(vllm), size.pairs), size)


def native_sdk_line(size: Size, threads: int) -> None:
    """The native engine through the SDK."""
    own = {"TINWORKS_SAMPLE_ENGINE": "native", "TINWORKS_TORCH_THREADS": str(threads)}
    environment = own | {"OMP_NUM_THREADS": str(threads)}
    with fleet(model=None, sampler_python=None, environment=environment) as service:
        burst = Sides(size, vocab_size_of(service)).sdk([service.base_sampler()])
        service.stop_training()
        speeds = list(itertools.islice(speeds_of(burst, size), 3, 3 + size.pairs))
    bar = TOKENS_PER_SECOND["native-sdk"]
    print(f"{'native-sdk':15} {np.median(speeds):.0f} tokens/s  bar {bar}", flush=True)


def speeds_of(burst: Callable[[], None], size: Size) -> Iterator[float]:
    """Tokens per second, again and again."""
    while True:
        start = time.perf_counter()
        burst()
        yield size.requests * size.tokens / (time.perf_counter() - start)


def vocab_size_of(service: Fleet) -> int:
    """Of the served model."""
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(service.model).vocab_size)


def vllm_environment(threads: int) -> dict[str, str]:
    """The settings of vLLM, the same on both sides."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "TINWORKS_TORCH_THREADS": str(threads),
        "TINWORKS_SAMPLE_ENGINE": "vllm",
        "TINWORKS_VLLM_KV_CACHE_BYTES": str(1 << 30),
        "TINWORKS_VLLM_MAX_LORAS": str(2 * ADAPTERS),
        "TINWORKS_VLLM_MAX_LORA_RANK": str(RANK),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, help="the Python of vLLM's environment")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="of each engine")
    lines = [name for names in GROUPS.values() for name in names]
    parser.add_argument("--only", nargs="*", choices=lines, default=lines)
    options = parser.parse_args()
    size = Size(options.requests, options.tokens, options.pairs)
    wanted = {group: [name for name in names if name in options.only] for group, names in GROUPS.items()}
    print(f"threads={options.threads} requests={size.requests} tokens={size.tokens} pairs={size.pairs}", flush=True)
    if options.vllm_python and options.model and wanted["model"]:
        vllm_lines(wanted["model"], options.model, options.vllm_python, size, options.threads)
    if options.vllm_python and wanted["tiny"]:
        vllm_lines(wanted["tiny"], None, options.vllm_python, size, options.threads)
    if wanted["native-sdk"]:
        native_sdk_line(size, options.threads)
    if wanted["native"]:
        torch.set_num_threads(options.threads)
        for name, found in native_ratios(model_of(None), Load(size.requests, size.tokens), size.pairs):
            if name in wanted["native"]:
                print(f"{name:15} {found}  bar {NATIVE_BARS[name]}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # the SDK's transport may abort when the interpreter takes itself down


if __name__ == "__main__":
    main()
