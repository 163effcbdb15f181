"""From the death of a train worker to its run's next step: `python bench/recovery.py [--kills 5] [--runs 1] [--alone]`.

A whole service with its default settings, on Postgres and Redis, and a script that steps without a pause. The worker
that holds its run is killed (SIGKILL) at random moments; the time counts until the end of the first step that its
client has begun after that, and until another worker has taken the run. A second worker is there to take over, and a
new one is started before the next kill. With `--alone` there is none, and the dead one is started again at once, as a
supervisor would. With `--runs` there are so many scripts, and each run of the dead worker counts. In the end the worker
is asked to stop (SIGTERM).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.fleet import RANK, WAIT_S  # isort: skip  # it sets the SDK's environment

import numpy as np
import tinker
from sqlalchemy import select
from tinker import types

from app.runs.models import Run
from tests.e2e.roles import Deployment
from tests.services import postgres_server, redis_server, wait_for

TOKENS = 64
DATUMS = 8
STEPS_BEFORE = 20
LONGEST_S = 120.0


class Script:
    """A client that steps, and notes when each step began and ended. Monotonic seconds."""

    def __init__(self, client: tinker.ServiceClient) -> None:
        draw = np.random.default_rng(0)
        self._data = []
        for _ in range(DATUMS):
            tokens = [int(token) for token in draw.integers(1, 200, TOKENS + 1)]
            inputs = {"target_tokens": tokens[1:], "weights": [1.0] * TOKENS}
            model_input = types.ModelInput.from_ints(tokens[:-1])
            self._data.append(types.Datum(model_input=model_input, loss_fn_inputs=inputs))
        self._training = client.create_lora_training_client(base_model="tiny", rank=RANK).result(WAIT_S)
        self.model_id = self._training.model_id
        self.steps: list[tuple[float, float]] = []
        self.error: Exception | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                forward = self._training.forward_backward(self._data, "cross_entropy")
                step = self._training.optim_step(types.AdamParams(learning_rate=1e-4))
                forward.result(LONGEST_S)
                step.result(LONGEST_S)
                self.steps.append((began, time.monotonic()))
        except Exception as error:
            self.error = error

    def first_step_after(self, moment: float) -> float:
        """When the first step ended that began after the moment."""
        found: list[float] = []

        def is_there() -> bool:
            assert self.error is None, self.error
            found[:] = [ended for began, ended in self.steps[-50:] if began > moment][:1]
            return bool(found)

        wait_for(is_there, LONGEST_S)
        return found[0]

    def stop(self) -> None:
        """Finish the running step."""
        self._stopping.set()
        self._thread.join(LONGEST_S)


class Leases:
    """Who holds runs."""

    def __init__(self, running: Deployment) -> None:
        self._running = running

    def held(self, scripts: Sequence[Script]) -> dict[str, tuple[str | None, int]]:
        """Run → its worker and its epoch."""
        ids = [script.model_id for script in scripts]
        with self._running.database.read() as session:
            rows = session.execute(select(Run.id, Run.worker_id, Run.epoch).where(Run.id.in_(ids)))
            return {model_id: (worker_id, epoch) for model_id, worker_id, epoch in rows}

    def taken_after(self, before: dict[str, tuple[str | None, int]], scripts: Sequence[Script]) -> list[float]:
        """When each run had a new worker, as well as one can see."""
        moments: dict[str, float] = {}

        def all_taken() -> bool:
            for model_id, (worker_id, epoch) in self.held(scripts).items():
                if worker_id is not None and epoch > before[model_id][1]:
                    moments.setdefault(model_id, time.monotonic())
            return len(moments) == len(scripts)

        wait_for(all_taken, LONGEST_S)
        return list(moments.values())


@dataclass(frozen=True)
class Disturbance:
    """Seconds from the end of a worker until another one had its runs, and until their next steps."""

    taken: list[float]
    stepped: list[float]


def disturb(
    running: Deployment, scripts: Sequence[Script], how: str, draw: random.Random, *, workers: int
) -> Disturbance:
    """Let the scripts step for a while, end the worker of the first one, and wait for the next steps of its runs."""
    running.scale(train=workers)
    steps = [len(script.steps) for script in scripts]
    enough = list(zip(scripts, steps, strict=True))
    wait_for(lambda: all(len(one.steps) >= n + STEPS_BEFORE or one.error for one, n in enough), LONGEST_S)
    time.sleep(draw.uniform(0.0, 3.0))
    leases = Leases(running)
    before = leases.held(scripts)
    dying = before[scripts[0].model_id][0]
    assert dying is not None
    struck = [script for script in scripts if before[script.model_id][0] == dying]
    process, moment = running.process_of(dying), time.monotonic()
    if how == "SIGKILL":
        process.kill()
    else:
        process.terminate()
    if workers == 1:
        running.run("train")
    taken = [at - moment for at in leases.taken_after(before, struck)]
    stepped = [script.first_step_after(moment) - moment for script in struck]
    print(
        f"  {how}, {len(struck)} runs: taken after {max(taken):5.2f} s, next step after {max(stepped):5.2f} s",
        flush=True,
    )
    process.wait(60)
    return Disturbance(taken, stepped)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true", help="one worker, started again at once")
    args = parser.parse_args()
    draw, workers = random.Random(args.seed), 1 if args.alone else 2
    with tempfile.TemporaryDirectory() as temporary, postgres_server() as postgres:
        folder = Path(temporary)
        with redis_server(folder) as redis:
            (folder / "data").mkdir()
            url = postgres.url(postgres.create())
            running = Deployment(folder / "data", database_url=url, redis_url=redis.url)
            try:
                running.start()
                for process in running.alive("sample"):  # it has no part in this
                    process.kill()
                key = running.tinworks("keys", "create", "bench").strip()
                client = tinker.ServiceClient(base_url=running.base_url, api_key=key)
                scripts = [Script(client) for _ in range(args.runs)]
                killed = [disturb(running, scripts, "SIGKILL", draw, workers=workers) for _ in range(args.kills)]
                asked = disturb(running, scripts, "SIGTERM", draw, workers=workers)
                for script in scripts:
                    script.stop()
                took = [1e3 * (ended - began) for script in scripts for began, ended in script.steps]
            finally:
                running.close()
    print(f"a step takes {np.median(took):.0f} ms; {len(took)} steps of {args.runs} runs")
    for what, seconds in (
        ("until another worker has the run", [s for one in killed for s in one.taken]),
        ("until the end of its next step", [s for one in killed for s in one.stepped]),
    ):
        print(f"SIGKILL {what}: p50 {np.median(seconds):.2f} s, max {max(seconds):.2f} s ({args.kills} kills)")
    print(f"SIGTERM until the end of the next step: max {max(asked.stepped):.2f} s")


if __name__ == "__main__":
    main()
