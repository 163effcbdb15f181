"""What a flood costs its neighbours: `python -m bench.fairness [--awaited 40] [--tokens 256] [--pass-tokens 16384]`.

A whole service with the tiny model. One tenant awaits each of its requests through the SDK, `forward_backward` of so
many tokens and `optim_step` in turns: first alone, then beside a tenant that keeps 100 to 200 times as many tokens in
the queue all the time, in `--runs` runs, from another process. Prints the length of the worker's full passes, the first
tenant's latencies in both parts, and by how many passes its p95 is higher: at most one is the bar.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import tinker
from tinker import types

from tests.e2e.service import Service, wait_until
from tests.e2e.wire_client import WireClient

LOAD = 100
FULL = 0.9
WARM_UP = 3


def flood(base_url: str, runs: int, tokens: int) -> None:
    """In each run two calls of `LOAD / runs` chunks, and their steps; a new one for each that is done, for ever."""
    client = WireClient(base_url)
    rows = [np.random.default_rng(1).integers(0, 1000, tokens + 1).tolist()]

    def keep_busy(run: str, chunks: int) -> None:
        waiting: deque[str] = deque()
        seq_ids = itertools.count(1)
        while True:
            for _ in range(chunks):
                client.forward_backward(run, next(seq_ids), rows)
            waiting.append(client.optim_step(run, next(seq_ids)).json()["request_id"])
            if len(waiting) > 1:
                client.wait(waiting.popleft())

    names = [client.create_run() for _ in range(runs)]
    threads = [threading.Thread(target=keep_busy, args=(name, LOAD // runs)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Modest:
    """The tenant that awaits each answer."""

    def __init__(self, base_url: str, tokens: int) -> None:
        service = tinker.ServiceClient(base_url=base_url, api_key="tml-modest")
        self._training = service.create_lora_training_client(base_model="tiny", rank=4).result()
        row = np.random.default_rng(0).integers(0, 1000, tokens + 1).tolist()
        weights = [1.0] * tokens
        inputs = {"target_tokens": row[1:], "weights": weights}
        self._data = [types.Datum(model_input=types.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)]

    def latencies(self, count: int) -> dict[str, list[float]]:
        """Seconds of each awaited operation."""
        taken: dict[str, list[float]] = {"forward_backward": [], "optim_step": []}
        for _ in range(count):
            start = time.perf_counter()
            self._training.forward_backward(self._data, "cross_entropy").result()
            middle = time.perf_counter()
            self._training.optim_step(types.AdamParams(learning_rate=1e-4)).result()
            taken["forward_backward"].append(middle - start)
            taken["optim_step"].append(time.perf_counter() - middle)
        return taken


def cycles(logs: Path) -> Iterator[tuple[int, float]]:
    """Tokens and seconds of the worker's cycles so far."""
    for log in logs.glob("*.log"):
        for line in log.read_text().splitlines():
            if '"cycle_done"' in line:
                event = json.loads(line)
                yield event["pass_tokens"], event["seconds"]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--awaited", type=int, default=40, help="calls of the modest tenant in each part")
    parser.add_argument("--tokens", type=int, default=256, help="of one call")
    parser.add_argument("--runs", type=int, default=20, help="of the flood")
    parser.add_argument("--pass-tokens", type=int, default=16384)
    parser.add_argument("--flood-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.flood_of:
        flood(args.flood_of, args.runs, args.tokens)
        return
    environment = {"TINWORKS_LOG_LEVEL": "debug", "TINWORKS_PASS_TOKENS": str(args.pass_tokens)}
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder) / "data", environment=environment)
        service.start()
        logs = service.data_dir / "log"
        modest = Modest(service.base_url, args.tokens)
        modest.latencies(WARM_UP)
        alone = modest.latencies(args.awaited)
        command = [sys.executable, "-m", "bench.fairness", "--flood-of", service.base_url]
        command += ["--runs", str(args.runs), "--tokens", str(args.tokens)]
        flooding = subprocess.Popen(command)

        def full() -> list[float]:
            return [seconds for tokens, seconds in cycles(logs) if tokens >= FULL * args.pass_tokens]

        try:
            wait_until(lambda: len(full()) > WARM_UP, timeout_s=300, what="the flood fills passes")
            beside = modest.latencies(args.awaited)
            passes = full()[WARM_UP:]
        finally:
            flooding.terminate()
            flooding.wait(10)
            service.stop()
    length, slow = (float(x) for x in np.percentile(passes, [50, 95]))
    print(f"{len(passes)} full passes of {args.pass_tokens} tokens: p50 {length:.3f} s  p95 {slow:.3f} s")
    for kind in alone:
        p50, p95 = np.percentile(alone[kind], [50, 95])
        q50, q95 = np.percentile(beside[kind], [50, 95])
        print(
            f"{kind:17s} alone p50 {p50:.3f} s p95 {p95:.3f} s  beside {LOAD}x p50 {q50:.3f} s p95 {q95:.3f} s", end=""
        )
        print(f"  p95 raised by {(q95 - p95) / length:.2f} passes (p50), {(q95 - p95) / slow:.2f} (p95)")
    os._exit(0)


if __name__ == "__main__":
    main()
