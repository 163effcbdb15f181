"""The scripts of three tenants, as their authors would write them: none knows that anything may die.

`python -m tests.chaos.tenants NAME BASE_URL KEY OUT SPAN_S` runs one once it reads a line from its standard input, and
writes to the file OUT what it asked for and was told. What is random in them, samples, is not trained on.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ["TINKER_TELEMETRY"] = "0"

import tinker
import torch
from tinker import types

from tests.chaos.tenant_names import END, LAST, SHORT
from tests.e2e.data import batch

MODEL = "tiny"
RANK = 4
_ADAM = types.AdamParams(learning_rate=2e-3, eps=1e-8)
_BURST = 4


@dataclass(frozen=True)
class _Pass:
    future: Any
    tokens: int


class Ledger:
    """A run, and what was asked of it, in order."""

    def __init__(self, run: tinker.TrainingClient, *, created_by: str = "create_model") -> None:
        self.run = run
        self.kinds = [created_by]
        self.names: list[str] = []
        self.tokens = self.steps = 0
        self.losses: list[float] = []
        self.logprobs: list[list[float]] = []

    def submit(self, call: Callable[[], Any], data: list[types.Datum], *kinds: str) -> _Pass:
        """A pass over data, which is one operation of each of these kinds."""
        tokens = sum(datum.model_input.length for datum in data)
        self.kinds += kinds
        self.tokens += len(kinds) * tokens
        return _Pass(call(), tokens)

    def step(self, *passes: _Pass) -> None:
        """An optimizer step after these passes; wait for all of them."""
        self.kinds.append("optim_step")
        self.steps += 1
        taken = self.run.optim_step(_ADAM)
        self.losses += [one.future.result().metrics["loss:sum"] / one.tokens for one in passes]
        taken.result()

    def save(self, name: str) -> str:
        """All that training resumes from."""
        self.kinds.append("save_weights")
        self.names.append(name)
        return self.run.save_state(name).result().path

    def save_adapter(self, name: str) -> None:
        """What samplers load."""
        self.kinds.append("save_weights_for_sampler")
        self.names.append(name)
        self.run.save_weights_for_sampler(name).result()

    def load(self, path: str, *, steps: int) -> None:
        """Go back to a state that had made so many steps."""
        self.kinds.append("load_weights")
        self.run.load_state_with_optimizer(path).result()
        self.steps = steps

    def sampler(self) -> tinker.SamplingClient:
        """Samples of the present weights."""
        self.kinds.append("save_weights_for_sampler")
        return self.run.save_weights_and_get_sampling_client().result()

    def end(self) -> None:
        """Save the final adapter, and ask what it makes of some data."""
        self.save_adapter(LAST)
        data = batch(4000, [20, 7])
        asked = self.submit(partial(self.run.forward, data, "cross_entropy"), data, "forward")
        self.logprobs = [output["logprobs"].tolist() for output in asked.future.result().loss_fn_outputs]

    def told(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "model_id": self.run.model_id,
            "kinds": self.kinds,
            "names": self.names,
            "tokens": self.tokens,
            "steps": self.steps,
            "losses": self.losses,
            "logprobs": self.logprobs,
        }


class Pace:
    """Spreads a script over a span of time, in bursts of a few steps; one that is late does not wait."""

    def __init__(self, steps: int, span_s: float) -> None:
        self._begin, self._steps, self._span_s = time.monotonic(), steps, span_s

    def before(self, step: int) -> None:
        """Wait until this step may begin."""
        burst = step // _BURST * _BURST
        time.sleep(max(0.0, self._begin + burst / self._steps * self._span_s - time.monotonic()))


def sft(client: tinker.ServiceClient, span_s: float) -> list[Ledger]:
    """Supervised: each step sums two batches. Goes back to an early state once, and ends in a second run made from the
    state of the first."""
    one = Ledger(client.create_lora_training_client(base_model=MODEL, rank=RANK, seed=1).result())
    steps, pace, early = 44, Pace(52, span_s), ""

    def advance(ledger: Ledger, step: int) -> None:
        pace.before(step)
        batches = [batch(1000 + 2 * step + half, [18, 30, 9]) for half in range(2)]
        passes = []
        for data in batches:
            call = partial(ledger.run.forward_backward, data, "cross_entropy")
            passes.append(ledger.submit(call, data, "forward_backward"))
        ledger.step(*passes)

    for step in range(steps):
        if step == 8:
            early = one.save("early")
        if step == 16:
            one.load(early, steps=8)
        if step == 28:
            one.save_adapter("middle")
        if step == steps - 1:
            one.save_adapter(SHORT)
        advance(one, step)
    one.end()
    state = one.save(END)
    two = Ledger(client.create_training_client_from_state_with_optimizer(state).result(), created_by="load_weights")
    two.steps = one.steps
    for step in range(steps, steps + 8):
        if step == steps + 7:
            two.save_adapter(SHORT)
        advance(two, step)
    two.end()
    two.save(END)
    return [one, two]


def rl(client: tinker.ServiceClient, span_s: float) -> list[Ledger]:
    """Reinforcement learning, but on data that is the same each time: samples of each policy come while it trains."""
    ledger = Ledger(client.create_lora_training_client(base_model=MODEL, rank=RANK, seed=2).result())
    rounds, steps = 10, 4
    pace = Pace(rounds * steps, span_s)
    params = types.SamplingParams(max_tokens=12, stop=[])
    for turn in range(rounds):
        pace.before(turn * steps)
        sampler = ledger.sampler()
        prompts = [types.ModelInput.from_ints([50 + turn, 60, 70 + n]) for n in range(4)]
        waiting = [sampler.sample(prompt, 2, params) for prompt in prompts]
        for step in range(steps):
            data = [_advantage(datum) for datum in batch(2000 + turn * steps + step, [14, 25])]
            if turn == rounds - 1 and step == steps - 1:
                ledger.save_adapter(SHORT)
            call = partial(ledger.run.forward_backward, data, "importance_sampling")
            ledger.step(ledger.submit(call, data, "forward_backward"))
        for sampled in waiting:
            sequences = sampled.result().sequences
            assert len(sequences) == 2 and all(len(s.tokens) == len(s.logprobs or []) == 12 for s in sequences)
    ledger.end()
    ledger.save(END)
    return [ledger]


def _advantage(datum: types.Datum) -> types.Datum:
    targets = datum.loss_fn_inputs["target_tokens"]
    n = len(targets.tolist())
    advantages = [0.5 if i % 3 else -1.0 for i in range(n)]
    inputs = {"target_tokens": targets, "logprobs": [-7.5] * n, "advantages": advantages}
    return types.Datum(model_input=datum.model_input, loss_fn_inputs=inputs)


def hinge(logprobs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A loss of its own, on the server."""
    return (torch.nn.functional.softplus(-6.0 - logprobs) * weights).sum(), {}


def _square(data: list[types.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Another, on the client."""
    total = torch.stack([((one + 6.0) ** 2).sum() for one in logprobs]).sum()
    return 0.05 * total, {}


def custom(client: tinker.ServiceClient, span_s: float) -> list[Ledger]:
    """Custom losses, on the server and on the client in turn."""
    loss = client.create_custom_loss(hinge, {"logprobs": 1, "weights": 1}).result()
    ledger = Ledger(client.create_lora_training_client(base_model=MODEL, rank=RANK, seed=3).result())
    steps = 40
    pace = Pace(steps, span_s)
    for step in range(steps):
        pace.before(step)
        data = batch(3000 + step, [22, 11])
        if step == steps - 1:
            ledger.save_adapter(SHORT)
        call = partial(ledger.run.forward_backward_custom, data, _square if step % 2 else loss)
        ledger.step(ledger.submit(call, data, *(("forward",) if step % 2 else ()), "forward_backward"))
    ledger.end()
    ledger.save(END)
    return [ledger]


SCRIPTS = {"sft": sft, "rl": rl, "custom": custom}


def main(name: str, base_url: str, key: str, out: str, span_s: str) -> None:
    """Run a script when told to."""
    torch.set_num_threads(1)
    sys.stdin.readline()
    client = tinker.ServiceClient(base_url=base_url, api_key=key)
    told = [ledger.told() for ledger in SCRIPTS[name](client, float(span_s))]
    unfinished = Path(out + ".unfinished")
    unfinished.write_text(json.dumps(told))
    unfinished.rename(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
