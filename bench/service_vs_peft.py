"""The whole service against a bare loop: `forward_backward` through the SDK, `tinworks up` and all, in alternation with
plain transformers + PEFT in this process.

    python bench/service_vs_peft.py [--model FOLDER] [--pairs 20] [--tokens 64] [--threads 0] [--only NAME …]

Without --model, the tiny model that `tinworks up` makes. Prints how many times as fast the service is, with the 95 %
interval and the bar:

full            8 sequences of --tokens tokens
zero-weights    the same, three quarters of the tokens without weight
ragged          32 sequences of 16 … 256 tokens; the loop pads 8 at a time
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")
os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as in our workers, so that neither side's threads hold a core idle
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import tinker
import torch
from loops import check_same_loss, datums, model_of, peft_step, with_peft
from pairs import timed
from tinker import types

from app.wire.types import Datum
from tests.e2e.service import Service

RANK = 8
VOCABULARY = 1024
BARS = {"full": 1.0, "zero-weights": 1.2, "ragged": 1.5}


def data_of(case: str, tokens: int) -> tuple[list[Datum], int | None]:
    """The datums of a case, and how many of them the loop takes at a time."""
    if case == "ragged":
        return datums(np.random.default_rng(1).integers(16, 257, 32).tolist(), VOCABULARY), 8
    return datums([tokens] * 8, VOCABULARY, unweighted=0.75 if case == "zero-weights" else 0.0), None


def service_step(training: tinker.TrainingClient, data: Sequence[Datum]) -> Callable[[], float]:
    """`forward_backward` through the official SDK; returns the loss."""
    sent = [
        types.Datum(
            model_input=types.ModelInput.from_ints(datum.tokens.tolist()),
            loss_fn_inputs={name: types.TensorData.from_numpy(values) for name, values in datum.inputs.items()},
        )
        for datum in data
    ]
    return lambda: float(training.forward_backward(sent, "cross_entropy").result().metrics["loss:sum"])


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="of each side; 0: all cores")
    parser.add_argument("--only", nargs="*", choices=list(BARS), default=list(BARS))
    options = parser.parse_args()
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--base-model", f"bench={options.model}"] if options.model else []
        environment = {"TINWORKS_TORCH_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        service = Service(Path(folder) / "data", *arguments, environment=environment)
        service.start()
        try:
            model = with_peft(model_of(options.model or service.data_dir / "models" / "tiny"), RANK)
            client = tinker.ServiceClient(base_url=service.base_url, api_key="tml-bench")
            name = "bench" if options.model else "tiny"
            training = client.create_lora_training_client(base_model=name, rank=RANK).result()
            print(f"threads={threads} tokens={options.tokens} pairs={options.pairs}")
            for case in options.only:
                data, batch = data_of(case, options.tokens)
                ours, theirs = service_step(training, data), peft_step(model, data, batch=batch)
                check_same_loss(ours, theirs)
                found = timed(ours, theirs, options.pairs)
                print(f"{case:13} {found}  bar {BARS[case]}  ours {found.ours:.1f} ms, against {found.theirs:.1f} ms")
        finally:
            service.stop()
    os._exit(0)


if __name__ == "__main__":
    main()
