"""The Procfile's lines as a platform restarts them, role by role, under a client that trains and samples."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import tinker
from tinker import types

from tests.e2e.data import datum, largest_gap, logprobs, train
from tests.e2e.roles import ROOT, Deployment
from tests.e2e.test_quickstart import PAIRS
from tests.services import PostgresServer, redis_server

ROLES = ("web", "train", "sample", "beat")
STEPS = 10
"""Of each part of the script: some before a role's process is gone, some while it is, some with the next one."""
RATE = 3e-3
EXIT_S = 30.0
"""What platforms allow between SIGTERM and SIGKILL."""


@pytest.fixture(scope="module")
def deployment(shared_postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One process of each role."""
    folder = tmp_path_factory.mktemp("restarts")
    name = shared_postgres.create()
    with redis_server(folder) as redis:
        running = Deployment(folder / "data", database_url=shared_postgres.url(name), redis_url=redis.url)
        try:
            running.start()
            yield running
        finally:
            running.close()
    shared_postgres.drop(name)


class Quickstart:
    """The README's script, in parts."""

    def __init__(self, client: tinker.ServiceClient) -> None:
        self.training = client.create_lora_training_client(base_model="tiny", rank=16, seed=5).result(60)
        tokenizer = self.training.get_tokenizer()
        self.data, self.prompts = [], []
        for english, pig_latin in PAIRS:
            prompt = tokenizer.encode(f"English: {english}\nPig Latin:")
            tokens = prompt + tokenizer.encode(f" {pig_latin}\n")
            weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
            self.data.append(datum(tokens[:-1], tokens[1:], weights))
            self.prompts.append(types.ModelInput.from_ints(prompt))

    def part(self) -> None:
        """Some steps, then samples of what they have made."""
        for _ in range(STEPS):
            forward = self.training.forward_backward(self.data, "cross_entropy")
            step = self.training.optim_step(types.AdamParams(learning_rate=RATE, eps=1e-8))
            forward.result(90)
            step.result(90)
        sampler = self.training.save_weights_and_get_sampling_client().result(90)
        params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
        for prompt in self.prompts:
            assert len(sampler.sample(prompt, 1, params).result(90).sequences[0].tokens) == 8

    def logprobs(self) -> list[list[float]]:
        return logprobs(self.training, self.data)


def documented() -> set[str]:
    """Names of environment variables that the documentation has."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {name for page in pages for name in re.findall(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|PORT", page.read_text())}


def test_a_deployment_needs_no_variable_that_is_not_documented(deployment: Deployment) -> None:
    assert deployment.environment.keys() - os.environ.keys() <= documented()


def test_a_client_notices_no_restart_of_any_role(deployment: Deployment) -> None:
    key = deployment.tinworks("keys", "create", "ada").strip()
    client = tinker.ServiceClient(base_url=deployment.base_url, api_key=key)
    disturbed, undisturbed = Quickstart(client), Quickstart(client)
    with ThreadPoolExecutor(1) as script:
        for role in ROLES:
            (process,) = deployment.alive(role)
            process.terminate()
            part = script.submit(disturbed.part)
            assert process.wait(EXIT_S) in (0, -signal.SIGTERM), role  # uvicorn ends by the signal itself
            deployment.run(role)
            part.result(120)
    train(undisturbed.training, undisturbed.data, len(ROLES) * STEPS, lr=RATE)
    assert largest_gap(disturbed.logprobs(), undisturbed.logprobs()) < 1e-3
    deployment.scale(train=1, sample=1)
    deployment.wait_healthy()
