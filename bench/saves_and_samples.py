"""What one tenant's saves cost another's samples: `python -m bench.saves_and_samples [--blocks 4] [--shared]`.

A whole service with the tiny model, trainer and sampler in processes of their own (`--one-process`: in one). One
tenant, in a process of its own, trains so many steps a block; in every other block it saves 20 times on the way
(`save_weights_and_get_sampling_client`) and draws one token from each save. Another tenant samples all the while, one
request after another. Prints the latencies of its samples in blocks with and without saves, and the ratio of their 99th
percentiles: at most 1.2 is the bar.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from tinker import types

from tests.e2e.data import batch
from tests.e2e.roles import Deployment
from tests.e2e.service import Service
from tests.services import redis_server

SAVES = 20
PROMPT = types.ModelInput.from_ints(list(range(50, 114)))
KEYS = {"trainer": "tml-trainer", "sampler": "tml-sampler"}


def trainer(base_url: str, steps: int) -> None:
    """Blocks of training, each after a line on standard input that says whether to save; a line out when it is done."""
    service = tinker.ServiceClient(base_url=base_url, api_key=KEYS["trainer"])
    training = service.create_lora_training_client(base_model="tiny", rank=8).result()
    data = batch(0, [64] * 16)
    one_token = types.SamplingParams(max_tokens=1, stop=[])
    print("ready", flush=True)
    for line in sys.stdin:
        for step in range(steps):
            training.forward_backward(data, "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
            if line.strip() == "save" and step % (steps // SAVES) == 0:
                saved = training.save_weights_and_get_sampling_client().result()
                saved.sample(PROMPT, 1, one_token).result()
        print("done", flush=True)


@contextmanager
def service_of(folder: Path, *, one_process: bool, shared: bool) -> Iterator[str]:
    """A running service; its URL."""
    extra = {"TINWORKS_AUTH": "open"} | ({"TINWORKS_SHARED_DIR": str(folder / "shared")} if shared else {})
    if one_process:
        service = Service(folder / "data", environment=extra)
        service.start()
        yield service.base_url
        service.stop()
        return
    with redis_server(folder) as redis:
        database_url = f"sqlite:///{folder / 'tinworks.db'}"
        deployment = Deployment(folder, database_url=database_url, redis_url=redis.url)
        deployment.environment.update(extra, OMP_NUM_THREADS="1")
        deployment.start()
        yield deployment.base_url
        deployment.close()


class Sampler:
    """The tenant that samples."""

    def __init__(self, base_url: str, tokens: int) -> None:
        service = tinker.ServiceClient(base_url=base_url, api_key=KEYS["sampler"])
        self._client = service.create_sampling_client(base_model="tiny").result()
        self._params = types.SamplingParams(max_tokens=tokens, stop=[])

    def until(self, over: Callable[[], bool]) -> list[float]:
        """Milliseconds of each sample until something is so."""
        taken = []
        while not over():
            start = time.perf_counter()
            self._client.sample(PROMPT, 1, self._params).result()
            taken.append((time.perf_counter() - start) * 1e3)
        return taken


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4, help="of each kind; they alternate")
    parser.add_argument("--steps", type=int, default=200, help="of training in one block")
    parser.add_argument("--tokens", type=int, default=8, help="of a sample")
    parser.add_argument("--shared", action="store_true", help="with a folder that trainer and sampler share")
    parser.add_argument("--one-process", action="store_true", help="one worker that trains and samples")
    parser.add_argument("--trainer-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer_of:
        trainer(args.trainer_of, args.steps)
        return
    latencies: dict[str, list[float]] = {"train": [], "save": []}
    with (
        tempfile.TemporaryDirectory() as folder,
        service_of(Path(folder), one_process=args.one_process, shared=args.shared) as base_url,
    ):
        command = [sys.executable, "-m", "bench.saves_and_samples", "--trainer-of", base_url]
        command += ["--steps", str(args.steps)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
            assert training.stdin is not None and training.stdout is not None
            assert training.stdout.readline() == "ready\n"
            sampler = Sampler(base_url, args.tokens)
            for number in range(2 * args.blocks + 1):
                kind = ("train", "save")[number % 2]
                print(kind, file=training.stdin, flush=True)
                done = threading.Thread(target=training.stdout.readline)
                done.start()
                taken = sampler.until(lambda done=done: not done.is_alive())  # type: ignore[misc]
                if number:  # the first warms up
                    latencies[kind] += taken
            training.stdin.close()
    for kind, what in (("train", "training"), ("save", f"training and {SAVES} saves")):
        p50, p95, p99 = np.percentile(latencies[kind], [50, 95, 99])
        count = len(latencies[kind])
        print(f"{count:6d} samples beside {what:22s} p50 {p50:6.1f} ms  p95 {p95:6.1f} ms  p99 {p99:6.1f} ms")
    ratio = np.percentile(latencies["save"], 99) / np.percentile(latencies["train"], 99)
    print(f"p99 with saves / without: {ratio:.2f} (bar: at most 1.2)")
    os._exit(0)


if __name__ == "__main__":
    main()
