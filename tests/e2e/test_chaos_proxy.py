"""Fifty steps, with samplers made on the way, through a network that drops, delays, duplicates and fails requests and
answers at random: the adapter is the one that an undisturbed run makes.

Faults follow from a seed that is drawn anew each time and printed with a failure; CHAOS_SEED repeats one.
"""

from __future__ import annotations

import io
import os
import random
import tarfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler

import httpx
import pytest
import tinker
import torch
from safetensors.torch import load
from tinker import types

from tests.e2e.bad_network import POLL, BadNetwork, Sent
from tests.e2e.conftest import MODEL
from tests.e2e.data import batch
from tests.e2e.service import Service

STEPS, SAVE_EVERY = 50, 10
WRONG_STEP = 25
"""Not the last: what one step more or less does must not be forgotten by the end."""
SAME, OTHER = 1e-3, 1e-2
"""Relative L2 distance of adapters: at most that of the same training, at least that of one with a step too much or
too few (SEMANTICS §2)."""
LONG_STEPS = 400


class Chaos(BadNetwork):
    """Does to each try what a throw of dice says. After two faults in a row an operation gets through."""

    FAULTS = {"request lost": 0.04, "request failed": 0.05, "answer lost": 0.05, "answer failed": 0.06}
    POLL_FAULTS = {"request lost": 0.01, "request failed": 0.02, "answer lost": 0.02, "answer failed": 0.02}
    DELAYED, AT_ONCE_AGAIN, LATE_AGAIN = 0.2, 0.15, 0.15
    LONGEST_DELAY_S, LATEST_S = 0.04, 1.5

    def __init__(self, upstream: str, seed: int) -> None:
        self._seed = seed
        self._late: list[Future[None]] = []
        self._closing = threading.Event()
        super().__init__(upstream)

    def treat(self, request: BaseHTTPRequestHandler, sent: Sent, number: int, attempt: int) -> None:
        draw = random.Random(f"{self._seed}:{sent.path}:{number}:{attempt}")
        faults = self.POLL_FAULTS if sent.path == POLL else self.FAULTS
        sure = 1.0 - sum(faults.values())
        (fault,) = draw.choices(["none", *faults], [sure, *faults.values()])
        fault = fault if attempt <= 2 else "none"
        self.faults[fault] += 1
        if draw.random() < self.DELAYED:
            time.sleep(draw.uniform(0, self.LONGEST_DELAY_S))
        if fault == "request lost":
            self.drop(request)
            return
        if fault == "request failed":
            self.fail(request)
            return
        twice = draw.random() < self.AT_ONCE_AGAIN
        copies = [self.copies.submit(self.forward, sent) for _ in range(2 if twice else 1)]
        received = [self.noted(sent, number, copy.result()) for copy in copies]
        if draw.random() < self.LATE_AGAIN and sent.path != POLL:
            self._late.append(self.copies.submit(self._again, sent, number, draw.uniform(0, self.LATEST_S)))
        self.faults["repeated"] += twice
        if fault == "answer lost":
            self.drop(request)
        elif fault == "answer failed":
            self.fail(request)
        else:
            self.reply(request, draw.choice(received))

    def _again(self, sent: Sent, number: int, after_s: float) -> None:
        """The same request once more, when the client has long gone on."""
        self._closing.wait(after_s)
        self.noted(sent, number, self.forward(sent))
        self.faults["late"] += 1

    def close(self) -> None:
        self._closing.set()
        for again in self._late:
            again.result()
        super().close()


def train(base_url: str, key: str, steps: Iterable[int]) -> tinker.TrainingClient:
    """A run of these steps, each on data of its own; now and then its weights are sampled from."""
    client = tinker.ServiceClient(base_url=base_url, api_key=key)
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=4).result(60)
    samples = []
    for done, step in enumerate(steps, 1):
        data = batch(1000 + step, [12, 20])
        forward = run.forward_backward(data, "cross_entropy")
        taken = run.optim_step(types.AdamParams(learning_rate=2e-3, eps=1e-8))
        forward.result(120)
        taken.result(120)
        if done % SAVE_EVERY == 0:
            sampler = run.save_weights_and_get_sampling_client().result(120)
            samples.append(sampler.compute_logprobs(data[0].model_input))
    assert all(len(sample.result(120)) == 12 for sample in samples)
    return run


def adapter(service: Service, key: str, run: tinker.TrainingClient) -> torch.Tensor:
    """All weights of a run's adapter as one vector, fetched past the proxy."""
    path = run.save_weights_for_sampler("final").result(120).path
    where = path.removeprefix("tinker://").replace("/sampler_weights/", "/checkpoints/sampler_weights/")
    url = f"{service.base_url}/api/v1/training_runs/{where}/archive"
    answer = httpx.get(url, headers={"x-api-key": key}, follow_redirects=True)
    with tarfile.open(fileobj=io.BytesIO(answer.raise_for_status().content)) as archive:
        file = archive.extractfile("adapter_model.safetensors")
        assert file is not None
        tensors = load(file.read())
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Relative L2."""
    return float((left - right).norm() / right.norm())


def trained(service: Service, steps: Iterable[int], seed: int | None = None) -> tuple[torch.Tensor, Counter[str]]:
    """The adapter after these steps, and what happened on the way: nothing without a seed."""
    key = f"tml-{uuid.uuid4().hex}"
    if seed is None:
        return adapter(service, key, train(service.base_url, key, steps)), Counter()
    network = Chaos(service.base_url, seed)
    try:
        run = train(network.url, key, steps)
        made = adapter(service, key, run)
    finally:
        network.close()
    assert {route: bodies for route, bodies in network.answers.items() if len(bodies) > 1} == {}
    return made, network.faults


@pytest.fixture(scope="module")
def quiet(service: Service) -> torch.Tensor:
    """The adapter of an undisturbed run."""
    return trained(service, range(STEPS))[0]


def disturbed(service: Service, steps: int) -> torch.Tensor:
    """The adapter of a run through chaos."""
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(2**32))
    print(f"CHAOS_SEED={seed}")
    made, faults = trained(service, range(steps), seed)
    print(dict(faults))
    assert all(faults[fault] for fault in (*Chaos.FAULTS, "repeated", "late"))
    return made


def test_a_run_through_a_chaotic_network_ends_as_an_undisturbed_one(service: Service, quiet: torch.Tensor) -> None:
    assert distance(disturbed(service, STEPS), quiet) <= SAME


@pytest.mark.parametrize("times", [0, 2], ids=["lost", "applied twice"])
def test_one_step_more_or_less_would_be_seen(service: Service, quiet: torch.Tensor, times: int) -> None:
    wrong = [step for step in range(STEPS) for _ in range(times if step == WRONG_STEP else 1)]
    assert distance(trained(service, wrong)[0], quiet) >= OTHER


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_long_run_through_a_chaotic_network_ends_as_an_undisturbed_one(service: Service) -> None:
    assert distance(disturbed(service, LONG_STEPS), trained(service, range(LONG_STEPS))[0]) <= SAME
