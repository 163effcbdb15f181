"""What tenants do in a soak, each in a process of its own: `python -m tests.soak.tenants NAME BASE_URL FOLDER`,
until it is killed.

A line for each step, when it ended (on the machine's monotonic clock) and how long it took, goes to FOLDER/NAME.steps.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
from tinker import types

from tests.e2e.data import batch, largest_gap, logprobs

MODEL = "tiny"
WAIT_S = 120.0
_ADAM = types.AdamParams(learning_rate=1e-4)
_EVERY_S = {"steady": 0.25, "policy": 0.75, "newcomers": 5.0}
"""How often a step begins, if the one before it is over: what a machine does an hour long should be the same work."""


class Clock:
    """Says when the next step begins, and keeps what steps took."""

    def __init__(self, file: Path, *, every_s: float) -> None:
        self._file = file.open("w", buffering=1)
        self._next = time.monotonic()
        self._every_s = every_s

    def step(self, act: Callable[[], object]) -> None:
        """Wait for its time, do it, note it."""
        time.sleep(max(0.0, self._next - time.monotonic()))
        began = time.monotonic()
        self._next = max(began, self._next + self._every_s)
        act()
        ended = time.monotonic()
        self._file.write(f"{ended:.3f} {ended - began:.5f}\n")


def _advance(run: tinker.TrainingClient, data: list[types.Datum]) -> None:
    passed = run.forward_backward(data, "cross_entropy")
    taken = run.optim_step(_ADAM)
    passed.result(WAIT_S)
    taken.result(WAIT_S)


def steady(client: tinker.ServiceClient, clock: Clock) -> NoReturn:
    """One run that trains all the time."""
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result(WAIT_S)
    data = batch(1, [64] * 8)
    while True:
        clock.step(lambda: _advance(run, data))


def policy(client: tinker.ServiceClient, clock: Clock) -> NoReturn:
    """One run whose new weights are sampled from again and again, each time by a sampler of its own."""
    run = client.create_lora_training_client(base_model=MODEL, rank=16, seed=2).result(WAIT_S)
    data = batch(2, [30, 50])
    params = types.SamplingParams(max_tokens=12, stop=[])

    def turn() -> None:
        _advance(run, data)
        sampler = run.save_weights_and_get_sampling_client().result(WAIT_S)
        prompts = [types.ModelInput.from_ints([50, 60, 70 + n]) for n in range(4)]
        waiting = [sampler.sample(prompt, 2, params) for prompt in prompts]
        assert all(len(one.result(WAIT_S).sequences) == 2 for one in waiting)

    while True:
        clock.step(turn)


def newcomers(client: tinker.ServiceClient, clock: Clock) -> NoReturn:
    """Sessions that come and go, more of them than a worker has slots: each trains a run of its own, saves, makes a
    second run of what it saved, deletes its checkpoints, and leaves; every third one without a word."""
    base_url, turn = os.environ["TINKER_BASE_URL"], 0
    while True:
        turn += 1

        def visit(turn: int = turn) -> None:
            mine = tinker.ServiceClient(base_url=base_url, api_key="tml-soak")
            run = mine.create_lora_training_client(base_model=MODEL, rank=2 + turn % 7, seed=turn).result(WAIT_S)
            data = batch(turn, [20, 9, 33])
            for _ in range(3):
                _advance(run, data)
            path = run.save_state(f"state-{turn}").result(WAIT_S).path
            again = mine.create_training_client_from_state_with_optimizer(path).result(WAIT_S)
            assert largest_gap(logprobs(run, data), logprobs(again, data)) < 1e-4
            rest = mine.create_rest_client()
            run.save_weights_for_sampler(f"adapter-{turn}").result(WAIT_S)
            saved = rest.list_checkpoints(run.model_id).result(WAIT_S).checkpoints
            assert len(saved) == 2
            for one in saved:
                rest.delete_checkpoint(run.model_id, one.checkpoint_id).result(WAIT_S)
            if turn % 3:
                mine.close("success").result(WAIT_S)
            else:
                mine.holder.close()

        clock.step(visit)


TENANTS: dict[str, Callable[[tinker.ServiceClient, Clock], NoReturn]] = {
    "steady": steady,
    "policy": policy,
    "newcomers": newcomers,
}


def main(name: str, base_url: str, folder: str) -> NoReturn:
    """Run one."""
    os.environ["TINKER_BASE_URL"] = base_url
    client = tinker.ServiceClient(base_url=base_url, api_key="tml-soak")
    try:
        TENANTS[name](client, Clock(Path(folder) / f"{name}.steps", every_s=_EVERY_S[name]))
    except BaseException:
        traceback.print_exc()
    os._exit(1)  # the SDK's threads of sessions that went without a word would not end


if __name__ == "__main__":
    main(*sys.argv[1:])
