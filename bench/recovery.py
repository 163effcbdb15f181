"""From the death of a train worker to its run's next step: `python bench/recovery.py [--kills 5] [--alone]`.

A whole service with its default settings, on Postgres and Redis, and a script that steps without a pause. The worker
that holds its run is killed (SIGKILL) at random moments; the time counts until the end of the first step that its
client has begun after that. A second worker is there to take over, and a new one is started before the next kill. With
`--alone` there is none, and the dead one is started again at once, as a supervisor would. In the end the worker is
asked to stop (SIGTERM).
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.fleet import RANK, WAIT_S  # isort: skip  # it sets the SDK's environment

import numpy as np
import tinker
from sqlalchemy import select
from tinker import types

from app.runs.models import Run
from tests.e2e.roles import Deployment, RoleProcess
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


def holder(running: Deployment, model_id: str) -> RoleProcess:
    """The process that holds the run."""
    with running.database.read() as session:
        worker_id = session.scalar(select(Run.worker_id).where(Run.id == model_id))
    assert worker_id is not None
    return running.process_of(worker_id)


def disturb(running: Deployment, script: Script, how: str, draw: random.Random, *, workers: int) -> float:
    """Let the script step for a while, end its worker, and return the seconds until its next step."""
    running.scale(train=workers)
    steps = len(script.steps)
    wait_for(lambda: len(script.steps) >= steps + STEPS_BEFORE or script.error, LONGEST_S)
    time.sleep(draw.uniform(0.0, 3.0))
    process, moment = holder(running, script.model_id), time.monotonic()
    if how == "SIGKILL":
        process.kill()
    else:
        process.terminate()
    if workers == 1:
        running.run("train")
    took = script.first_step_after(moment) - moment
    print(f"  {how}: {took:5.2f} s", flush=True)
    process.wait(60)
    return took


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
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
                script = Script(tinker.ServiceClient(base_url=running.base_url, api_key=key))
                killed = [disturb(running, script, "SIGKILL", draw, workers=workers) for _ in range(args.kills)]
                asked = disturb(running, script, "SIGTERM", draw, workers=workers)
                script.stop()
                took = [1e3 * (ended - began) for began, ended in script.steps]
            finally:
                running.close()
    print(f"a step takes {np.median(took):.0f} ms; {len(took)} steps")
    print(f"SIGKILL to the next step: p50 {np.median(killed):.2f} s, max {max(killed):.2f} s ({len(killed)} kills)")
    print(f"SIGTERM to the next step: {asked:.2f} s")


if __name__ == "__main__":
    main()
