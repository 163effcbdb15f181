"""Batch polling, numbered copies of sampling clients and cancellation, through the SDK, as a service asks for them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator

import pytest
import tinker
from tinker import types

from tests.e2e.conftest import MODEL
from tests.e2e.service import Service, wait_until

PROMPT = types.ModelInput.from_ints([50, 60, 70, 80])
SHORT = types.SamplingParams(max_tokens=4, stop=[])
ENDLESS = types.SamplingParams(max_tokens=100_000, stop=[])
FLAGS = {
    "TINWORKS_SAMPLE_USE_RETRIEVE_FUTURES": "true",
    "TINWORKS_SAMPLE_JOIN_SAMPLING_SESSION": "true",
    "TINWORKS_MAX_RUNNING_SEQUENCES": "8",
    "TINWORKS_METADATA_FIRST_BYTES": "20000",
    "TINWORKS_POLL_HOLD_S": "3",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(tmp_path_factory.mktemp("batch") / "data", environment=FLAGS)
    running.start()
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def sampler(service: Service) -> tinker.SamplingClient:
    client = tinker.ServiceClient(base_url=service.base_url, api_key="tml-batch")
    return client.create_sampling_client(base_model=MODEL).result(60)


def test_two_hundred_samples_wait_in_one_poll(sampler: tinker.SamplingClient) -> None:
    futures = [sampler.sample(PROMPT, 1, SHORT) for _ in range(200)]
    answers = [future.result(60) for future in futures]
    assert all(len(answer.sequences[0].tokens) == 4 for answer in answers)
    assert len({answer.sequences[0].sequence_id for answer in answers}) == 200
    poller = sampler._futures_poller
    assert poller is not None and poller._cursor > 0 and poller._failure is None
    wait_until(lambda: not poller._retrieved, timeout_s=10, what="results are acknowledged")


def test_a_large_result_comes_through_it(sampler: tinker.SamplingClient) -> None:
    params = types.SamplingParams(max_tokens=200, stop=[])
    answer = sampler.sample(PROMPT, 8, params, topk_sample_logprobs=5).result(60)
    assert [len(sequence.tokens) for sequence in answer.sequences] == [200] * 8


def test_a_refused_sample_does_not_end_the_others(sampler: tinker.SamplingClient) -> None:
    good = [sampler.sample(PROMPT, 1, SHORT) for _ in range(5)]
    with pytest.raises(tinker.BadRequestError, match="vocabulary"):
        sampler.sample(types.ModelInput.from_ints([10**8]), 1, SHORT).result(30)
    assert all(future.result(30).sequences for future in good)
    assert sampler.sample(PROMPT, 1, SHORT).result(30).sequences


def test_copies_of_a_client_sample_side_by_side(sampler: tinker.SamplingClient) -> None:
    copies = [pickle.loads(pickle.dumps(sampler)) for _ in range(3)]  # noqa: S301
    futures = [client.sample(PROMPT, 1, SHORT) for client in (sampler, *copies) for _ in range(20)]
    ids = {future.result(60).sequences[0].sequence_id for future in futures}
    assert len(ids) == 80
    assert sorted(client._cloned_sampler_id for client in copies) == [1, 2, 3]


def test_a_copy_in_another_process_gets_a_number_of_its_own(sampler: tinker.SamplingClient) -> None:
    program = (
        "import os, pickle, sys; from tinker import types\n"
        "client = pickle.loads(sys.stdin.buffer.read())\n"
        "params = types.SamplingParams(max_tokens=4, stop=[])\n"
        "print(len(client.sample(types.ModelInput.from_ints([50]), 1, params).result(60).sequences[0].tokens))\n"
        "print(client._cloned_sampler_id, flush=True)\n"
        "os._exit(0)\n"  # now and then the SDK's transport aborts while the interpreter takes itself down
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(sampler), capture_output=True, timeout=120, check=True
    )
    tokens, number = (int(line) for line in done.stdout.split())
    assert (tokens, number > 0) == (4, True)


def test_cancelling_frees_the_engine(sampler: tinker.SamplingClient) -> None:
    """Endless samples fill the engine many times over; once they are cancelled, a short one is served."""
    endless = [sampler.sample(PROMPT, 64, ENDLESS) for _ in range(8)]
    poller = sampler._futures_poller
    wait_until(lambda: len(poller._events) == 8, timeout_s=10, what="all are accepted")
    waiting = sampler.sample(PROMPT, 1, SHORT)
    with pytest.raises(TimeoutError):
        waiting.result(1)
    for future in endless:
        future.future().cancel()
    assert len(waiting.result(30).sequences[0].tokens) == 4


def test_samples_in_flight_outlive_a_killed_redis(service: Service, sampler: tinker.SamplingClient) -> None:
    """Redis comes back empty: the process that accepted the samples tells that they are lost, and the SDK sends them
    again."""
    params = types.SamplingParams(max_tokens=100, stop=[])
    futures = [sampler.sample(PROMPT, 4, params) for _ in range(40)]
    futures[0].result(60)
    service.kill("redis")
    assert not all(future.done() for future in futures)
    assert all(len(future.result(120).sequences) == 4 for future in futures)
