"""One AdamW or Dimuon step of many runs: all in one call against one call each, in one process.

    OMP_NUM_THREADS=1 python bench/optim_many_runs.py [--threads 1] [--pairs 40]

The runs train rank 8 on all layers of the tiny model that `tinworks up` makes. The two ways take turns, and the median
of each is printed with their ratio: below 1 the fused step is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from app.wire.types import AdamParams, DimuonParams, LoraConfig
from workers.model.adapter import Adapter
from workers.model.base import BaseModel
from workers.model.optim import OptimizerParams, OptimizerState, fresh_state, optimizer_step
from workers.model.tiny import make_model, make_tokenizer

RANK = 8
PARAMS: dict[str, OptimizerParams] = {"adamw": AdamParams(), "dimuon": DimuonParams(learning_rate=1e-3)}


def timed(step: Callable[[], object], adapters: list[Adapter]) -> float:
    """Seconds of a step on fresh gradients."""
    for adapter in adapters:
        adapter.add_grad(torch.randn_like(adapter.flat))
    start = time.perf_counter()
    step()
    if adapters[0].flat.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compare(base: BaseModel, kind: str, runs: int, pairs: int) -> None:
    """Print both medians and their ratio."""
    adapters = [base.new_adapter(LoraConfig(rank=RANK, seed=i)) for i in range(runs)]
    items: list[tuple[Adapter, OptimizerState, OptimizerParams]] = [
        (adapter, fresh_state(kind, adapter), PARAMS[kind]) for adapter in adapters
    ]
    ways: dict[str, Callable[[], object]] = {
        "fused": lambda: optimizer_step(items),
        "one by one": lambda: [optimizer_step([item]) for item in items],
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for step in ways.values():
        timed(step, adapters)
    for _ in range(pairs):
        for name, step in ways.items():
            times[name].append(timed(step, adapters))
    fused, alone = (statistics.median(times[name]) * 1e3 for name in ways)
    parameters = adapters[0].num_parameters
    print(
        f"{kind} {runs:3} runs of {parameters} parameters: fused {fused:8.3f} ms, one by one {alone:8.3f} ms, "
        f"ratio {fused / alone:.2f}"
    )


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    base = BaseModel(make_model(make_tokenizer()), "tiny")
    for kind in PARAMS:
        for runs in (1, 8, 64):
            compare(base, kind, runs, arguments.pairs)


if __name__ == "__main__":
    main()
