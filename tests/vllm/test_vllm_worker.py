"""A `-Q sample` worker with vLLM beside a trainer, as a platform runs them, and what happens when vLLM or it dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import psutil
import pytest
import tinker
from tinker import types

from tests.e2e import roles
from tests.e2e.data import batch, largest_gap, logprobs, train
from tests.e2e.roles import Deployment, RoleProcess
from tests.e2e.service import wait_until
from tests.services import PostgresServer, redis_server
from workers.sample.engines.vllm import DEAD_EXIT_CODE

POOL = "tiny"
DATA = batch(51, [24, 40, 9])
PROMPT = types.ModelInput.from_ints([50, 60, 70, 80])
RANK = 8
START_S = 300.0
"""vLLM's processes import for minutes where the cores are contended."""
IDLE_S = 0.8
"""vLLM as it comes would look for messages without a pause for longer."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def deployment(shared_postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One web, train, sample and beat process; the sampler has vLLM."""
    folder = tmp_path_factory.mktemp("vllm")
    name = shared_postgres.create()
    with redis_server(folder) as redis:
        running = Deployment(folder / "data", database_url=shared_postgres.url(name), redis_url=redis.url)
        running.environment |= {
            "TINWORKS_SAMPLE_ENGINE": "vllm",
            "TINWORKS_VLLM_ENFORCE_EAGER": "true",
            "TINWORKS_VLLM_KV_CACHE_BYTES": str(1 << 28),
            "TINWORKS_VLLM_MAX_LORA_RANK": str(RANK),
            "TINWORKS_AUTH": "open",
            "HF_HUB_OFFLINE": "1",
        }
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(roles, "READY_S", START_S)
                running.start()
                yield running
        finally:
            running.close()
    shared_postgres.drop(name)


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> tinker.ServiceClient:
    return tinker.ServiceClient(base_url=deployment.base_url, api_key="tml-anything")


def children(worker: RoleProcess) -> list[psutil.Process]:
    """vLLM's processes."""
    return psutil.Process(worker.pid).children(recursive=True)


def test_what_was_trained_is_sampled_with_the_trainers_logprobs(
    deployment: Deployment, client: tinker.ServiceClient
) -> None:
    run = client.create_lora_training_client(base_model=POOL, rank=RANK, seed=1).result(60)
    base = client.create_sampling_client(base_model=POOL).result(60)
    for _ in range(2):
        train(run, DATA, 3)
        tuned = run.save_weights_and_get_sampling_client().result(60)
        for datum, trained in zip(DATA, logprobs(run, DATA), strict=True):
            last = list(datum.loss_fn_inputs["target_tokens"].data)[-1]
            whole = types.ModelInput.from_ints([*datum.model_input.to_ints(), last])
            sampled, before = (sampler.compute_logprobs(whole) for sampler in (tuned, base))
            assert largest_gap([sampled.result(60)[1:]], [trained]) < 1e-4
            assert largest_gap([before.result(60)[1:]], [trained]) > 1e-2
    params = types.SamplingParams(max_tokens=12, stop=[], temperature=1.0, seed=5)
    sequences = tuned.sample(PROMPT, 4, params).result(60).sequences
    assert len({tuple(sequence.tokens) for sequence in sequences}) == 4
    for sequence in sequences:
        tokens = [*PROMPT.to_ints(), *sequence.tokens]
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]}
        )
        assert largest_gap([list(sequence.logprobs or [])], [logprobs(run, [datum])[0][-12:]]) < 1e-4


def test_vllm_leaves_the_cores_to_others_when_it_has_nothing_to_do(
    deployment: Deployment, client: tinker.ServiceClient
) -> None:
    sampler = client.create_sampling_client(base_model=POOL).result(60)
    [worker] = deployment.alive("sample")
    sampler.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result(60)
    own = children(worker)
    before = [sum(process.cpu_times()[:2]) for process in own]
    psutil.cpu_percent(IDLE_S)
    used = sum(sum(process.cpu_times()[:2]) - began for process, began in zip(own, before, strict=True))
    assert used < IDLE_S / 4


def test_a_rank_that_vllm_has_no_room_for_is_the_users_error(client: tinker.ServiceClient) -> None:
    run = client.create_lora_training_client(base_model=POOL, rank=2 * RANK).result(60)
    wide = run.save_weights_and_get_sampling_client().result(60)
    with pytest.raises(Exception, match="TINWORKS_VLLM_MAX_LORA_RANK"):
        wide.sample(PROMPT, 1, types.SamplingParams(max_tokens=2)).result(60)


def test_a_worker_whose_vllm_died_ends_and_another_answers(
    deployment: Deployment, client: tinker.ServiceClient
) -> None:
    sampler = client.create_sampling_client(base_model=POOL).result(60)
    [worker] = deployment.alive("sample")
    future = sampler.sample(PROMPT, 2, types.SamplingParams(max_tokens=1900, stop=[]))
    wait_until(lambda: psutil.Process(worker.pid).children(), timeout_s=10, what="vLLM has processes")
    for process in children(worker):
        process.kill()
    assert worker.wait(30) == DEAD_EXIT_CODE
    deployment.run("sample")
    assert [len(sequence.tokens) for sequence in future.result(120).sequences] == [1900, 1900]


def test_nothing_of_vllm_outlives_its_worker(deployment: Deployment) -> None:
    deployment.scale(sample=1)
    [worker] = deployment.alive("sample")
    own = children(worker)
    assert own
    os.kill(worker.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(own, timeout=15)
    assert not alive
