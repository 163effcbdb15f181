"""Bad input fails in under a second with a message that names the field, through the SDK; the run goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import pytest
import tinker
from tinker import types

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, datum


@pytest.fixture(scope="module")
def training(service) -> tinker.TrainingClient:  # type: ignore[no-untyped-def]
    client = tinker.ServiceClient(base_url=service.base_url, api_key="tml-bad-input")
    return client.create_lora_training_client(base_model=MODEL, rank=4).result()


def _fails(call: Callable[[], object], *words: str) -> None:
    begin = time.monotonic()
    with pytest.raises(tinker.TinkerError) as caught:
        call()
    assert time.monotonic() - begin < 1.0
    for word in words:
        assert word in str(caught.value)


GOOD = [5, 6, 7, 8]

CASES = {
    "token out of vocabulary": (lambda: [datum([5, 5000], [6, 7])], "cross_entropy", None, ("data[0]", "5000", "2048")),
    "target out of vocabulary": (lambda: [datum([5, 6], [6, -1])], "cross_entropy", None, ("target_tokens", "-1")),
    "too few targets": (lambda: [datum(GOOD, [6, 7])], "cross_entropy", None, ("data[0]", "target_tokens", "[4]")),
    "too few weights": (lambda: [datum(GOOD, GOOD, [1.0])], "cross_entropy", None, ("weights",)),
    "second datum wrong": (lambda: [*batch(1, [3]), datum(GOOD, [1])], "cross_entropy", None, ("data[1]",)),
    "over-long": (lambda: batch(1, [2049]), "cross_entropy", None, ("data[0]", "2049", "2048")),
    "unknown loss": (lambda: batch(1, [3]), "no_such_loss", None, ("loss_fn", "no_such_loss", "cross_entropy")),
    "unknown loss config": (lambda: batch(1, [3]), "cross_entropy", {"temperature": 1.0}, ("temperature",)),
    "unknown loss input": (
        lambda: [
            types.Datum(
                model_input=types.ModelInput.from_ints(GOOD),
                loss_fn_inputs={"target_tokens": GOOD, "wieghts": types.TensorData(data=[1.0] * 4, dtype="float32")},
            )
        ],
        "cross_entropy",
        None,
        ("wieghts",),
    ),
    "missing targets": (
        lambda: [
            types.Datum(model_input=types.ModelInput.from_ints(GOOD), loss_fn_inputs={"weights": [1.0] * 4}),
        ],
        "cross_entropy",
        None,
        ("target_tokens", "missing"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_batch_names_the_field(name: str, training: tinker.TrainingClient) -> None:
    make, loss, config, words = CASES[name]
    data = make()
    _fails(lambda: training.forward_backward(data, loss, config).result(30), *words)
    good = training.forward_backward(batch(2, [6]), "cross_entropy").result(30)
    assert math.isfinite(good.metrics["loss:sum"])


def test_unknown_model_names_it(client: tinker.ServiceClient) -> None:
    _fails(lambda: client.create_lora_training_client(base_model="no/such-model").result(30), "base_model", "no/such")
    assert client.create_lora_training_client(base_model=MODEL, rank=4).result(30)


def test_a_rank_over_the_limit_names_it(client: tinker.ServiceClient) -> None:
    _fails(lambda: client.create_lora_training_client(base_model=MODEL, rank=4096).result(30), "rank", "128")


def test_bad_hyperparameters_name_the_field(training: tinker.TrainingClient) -> None:
    _fails(lambda: training.optim_step(types.AdamParams(learning_rate=-1.0)).result(30), "learning_rate")
    _fails(lambda: training.optim_step(types.AdamParams(beta1=1.5)).result(30), "beta1")
    training.optim_step(types.AdamParams()).result(30)


def test_a_nan_gradient_is_refused_and_forgotten(training: tinker.TrainingClient) -> None:
    training.forward_backward([datum([5, 6], [6, 7], [math.nan, 1.0])], "cross_entropy").result(30)
    _fails(lambda: training.optim_step(types.AdamParams()).result(30), "gradient", "finite")
    output = training.forward_backward(batch(2, [6]), "cross_entropy").result(30)
    assert math.isfinite(output.metrics["loss:sum"])


@pytest.mark.parametrize(
    ("prompt", "params", "word"),
    [
        ([5, 9999], {"max_tokens": 1}, "9999"),
        ([5] * 2048, {"max_tokens": 1}, "context"),
        ([5], {"max_tokens": 0}, "max_tokens"),
        ([5], {"top_p": 1.5}, "top_p"),
        ([5], {"temperature": -1.0}, "temperature"),
        ([5], {"stop": [5000]}, "stop"),
    ],
)
def test_bad_sample_names_the_field(
    prompt: list[int], params: dict[str, object], word: str, client: tinker.ServiceClient
) -> None:
    sampler = client.create_sampling_client(base_model=MODEL)
    request = types.SamplingParams(**params)  # type: ignore[arg-type]
    _fails(lambda: sampler.sample(types.ModelInput.from_ints(prompt), 1, request).result(30), word)
