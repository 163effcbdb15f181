"""`kill -9` of the worker in the middle of a run: the script only waits, and the weights are those of a quiet run."""

from __future__ import annotations

import threading
from pathlib import Path

import tinker
from tinker import types

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, largest_gap, logprobs
from tests.e2e.service import Service, wait_until

DATA = batch(31, [24, 40, 9])
STEPS = 90


def _script(client: tinker.ServiceClient, on_step: threading.Event | None = None) -> list[list[float]]:
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=4).result()
    for step in range(STEPS):
        forward = run.forward_backward(DATA, "cross_entropy")
        taken = run.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-8))
        forward.result(120)
        taken.result(120)
        if on_step is not None and step == STEPS * 3 // 4:
            on_step.set()
    sampler = run.save_weights_and_get_sampling_client().result(120)
    sampler.sample(types.ModelInput.from_ints([5, 6, 7]), 2, types.SamplingParams(max_tokens=4)).result(120)
    return logprobs(run, DATA)


def test_a_run_survives_the_death_of_its_worker(tmp_path: Path) -> None:
    service = Service(tmp_path / "data")
    service.start()
    try:
        quiet = _script(tinker.ServiceClient(base_url=service.base_url, api_key="tml-quiet"))
        underway, result = threading.Event(), []
        client = tinker.ServiceClient(base_url=service.base_url, api_key="tml-disturbed")
        script = threading.Thread(target=lambda: result.append(_script(client, underway)))
        script.start()
        assert underway.wait(120)
        dead = service.kill("worker")
        script.join(170)
        assert result, "the script did not end"
        assert largest_gap(quiet, result[0]) < 1e-3
        wait_until(lambda: service.pid("worker") != dead, timeout_s=5, what="another worker")
    finally:
        assert service.stop() == 0


def test_health_says_what_is_missing_and_the_web_process_lives(tmp_path: Path) -> None:
    import httpx

    service = Service(tmp_path / "data")
    service.start()
    try:
        service.kill("redis")
        wait_until(lambda: service.health_status() == 503, timeout_s=10, what="healthz notices")
        assert httpx.get(f"{service.base_url}/livez").status_code == 200
        assert httpx.get(f"{service.base_url}/readyz").status_code == 200
        wait_until(service.is_healthy, timeout_s=30, what="everything is back")
        client = tinker.ServiceClient(base_url=service.base_url, api_key="tml-after")
        run = client.create_lora_training_client(base_model=MODEL, rank=4).result(60)
        run.forward_backward(DATA, "cross_entropy").result(60)
    finally:
        assert service.stop() == 0
