"""A whole service for a benchmark: web, trainer, sampler and scheduler as processes, on Postgres and Redis."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("TINKER_TELEMETRY", "0")
sys.path.insert(0, str(Path(__file__).parents[1]))

import tinker
from tinker import types

from tests.e2e.roles import Deployment
from tests.services import postgres_server, redis_server

MODEL = "bench"
RANK = 8
WAIT_S = 120.0
READY_S = 300.0
"""vLLM compiles the model first."""


class Fleet:
    """A running service whose sampler may have another Python than the rest."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.environment = deployment.environment
        self.model = Path(deployment.environment["TINWORKS_BASE_MODEL"].partition("=")[2])
        key = deployment.tinworks("keys", "create", "bench").strip()
        self._client = tinker.ServiceClient(base_url=deployment.base_url, api_key=key)

    def base_sampler(self) -> tinker.SamplingClient:
        """Samples of the base model."""
        return self._client.create_sampling_client(base_model=MODEL).result(WAIT_S)

    def adapter_samplers(self, count: int) -> tuple[list[tinker.SamplingClient], list[Path]]:
        """Samplers of so many adapters that a step of training has made, and the folders of their files."""
        made, folders = [], []
        known = set(self._adapter_folders())
        tokens = list(range(1, 17))
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * 15}
        data = [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]
        for seed in range(count):
            training = self._client.create_lora_training_client(base_model=MODEL, rank=RANK, seed=seed).result(WAIT_S)
            training.forward_backward(data, "cross_entropy").result(WAIT_S)
            training.optim_step(types.AdamParams(learning_rate=1e-3)).result(WAIT_S)
            made.append(training.save_weights_and_get_sampling_client().result(WAIT_S))
            new = set(self._adapter_folders()) - known
            folders.append(min(new))
            known |= new
        return made, folders

    def _adapter_folders(self) -> list[Path]:
        return [file.parent for file in self._deployment.folder.rglob("adapter_model.safetensors")]

    def stop_training(self) -> None:
        """End the trainer: it has no part in what follows."""
        for process in self._deployment.alive("train"):
            process.kill()


@contextmanager
def fleet(*, model: Path | None, sampler_python: Path | None, environment: dict[str, str]) -> Iterator[Fleet]:
    """`model`: a folder; without one the tiny model. `sampler_python`: the interpreter of the sample worker's
    environment; without one ours, and with that the native engine."""
    python = sampler_python or Path(sys.executable)
    commands = {"sample": f"{python} -m celery -A workers worker -Q sample"}
    with tempfile.TemporaryDirectory() as temporary, postgres_server() as postgres:
        folder = Path(temporary)
        with redis_server(folder) as redis:
            url = postgres.url(postgres.create())
            running = Deployment(
                folder / "data",
                database_url=url,
                redis_url=redis.url,
                model=model,
                commands=commands,
                ready_s=READY_S,
            )
            (folder / "data").mkdir(exist_ok=True)
            source = running.environment["TINWORKS_BASE_MODEL"].partition("=")[2]
            running.environment |= {"TINWORKS_BASE_MODEL": f"{MODEL}={source}", **environment}
            try:
                running.start()
                yield Fleet(running)
            finally:
                running.close()
