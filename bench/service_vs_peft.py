"""The whole service against a bare loop: `forward_backward` through the SDK, `tinworks up` and all, in alternation with
plain transformers + PEFT in this process.

    python -m bench.service_vs_peft [--model FOLDER] [--pairs 20] [--sequences 8] [--tokens 64] [--threads 0]

Without --model, the tiny model that `tinworks up` makes. Prints the median of each and their ratio: 1.3 is the bar.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as in our workers, so that neither side's threads hold a core idle

import numpy as np
import peft
import tinker
import torch
from tinker import types
from transformers import AutoModelForCausalLM

from tests.e2e.service import Service

RANK = 8
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def bare_step(folder: Path, rows: np.ndarray) -> Callable[[], float]:
    """The usual loop, gradients included; returns the loss."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules=TARGETS, lora_dropout=0.0, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config)
    tokens, targets = torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def step() -> float:
        model.zero_grad(set_to_none=False)
        logprobs = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits.float(), -1)
        loss = -logprobs.gather(-1, targets.unsqueeze(-1)).sum()
        loss.backward()
        return float(loss.detach())

    return step


def service_step(url: str, model: str, rows: np.ndarray) -> Callable[[], float]:
    """The same through the official SDK."""
    client = tinker.ServiceClient(base_url=url, api_key="tml-bench")
    training = client.create_lora_training_client(base_model=model, rank=RANK).result()
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1].tolist()),
            loss_fn_inputs={"target_tokens": row[1:].tolist(), "weights": [1.0] * (len(row) - 1)},
        )
        for row in rows
    ]

    def step() -> float:
        return float(training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"])

    return step


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="of each side; 0: all cores")
    options = parser.parse_args()
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--base-model", f"bench={options.model}"] if options.model else []
        environment = {"TINWORKS_TORCH_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        service = Service(Path(folder) / "data", *arguments, environment=environment)
        service.start()
        try:
            model_folder = options.model or service.data_dir / "models" / "tiny"
            rows = np.random.default_rng(0).integers(0, 1024, (options.sequences, options.tokens + 1))
            steps = {
                "bare": bare_step(model_folder, rows),
                "service": service_step(service.base_url, "bench" if options.model else "tiny", rows),
            }
            losses = {name: step() for name, step in steps.items()}
            assert abs(losses["bare"] - losses["service"]) < 1e-4 * losses["bare"], losses
            times: dict[str, list[float]] = {name: [] for name in steps}
            for _ in range(options.pairs):
                for name, step in steps.items():
                    begin = time.perf_counter()
                    step()
                    times[name].append(time.perf_counter() - begin)
        finally:
            service.stop()
    bare, ours = (1000 * statistics.median(times[name]) for name in ("bare", "service"))
    print(f"threads={threads} {options.sequences}x{options.tokens} bare={bare:.1f}ms service={ours:.1f}ms", end="  ")
    print(f"service/bare={ours / bare:.3f}")


if __name__ == "__main__":
    main()
