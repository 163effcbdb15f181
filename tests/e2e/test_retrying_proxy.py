"""A bad network between the SDK and the service: lost answers, dropped connections, requests that arrive twice.

Every operation is forwarded and then said to have failed, so the SDK sends all of them again; what is drawn further is
decided by the seed, the route, the operation's number and the attempt alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler

import pytest
import tinker
from tinker import types

from tests.e2e.bad_network import POLL, BadNetwork, Sent
from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, largest_gap, logprobs
from tests.e2e.service import Service

DATA = batch(61, [24, 40, 9])
STEPS = 15
SAVE_EVERY = 6
SEED = 7
DROPS, REPEATS, POLL_DROPS = 0.15, 0.4, 0.08


class EveryoneTwice(BadNetwork):
    """Forwards every operation and says that it failed, so that the SDK sends all of them again."""

    def treat(self, request: BaseHTTPRequestHandler, sent: Sent, number: int, attempt: int) -> None:
        draw = random.Random(f"{SEED}:{sent.path}:{number}:{attempt}")
        twice, dropped = draw.random() < REPEATS, draw.random() < (POLL_DROPS if sent.path == POLL else DROPS)
        copies = [self.copies.submit(self.forward, sent) for _ in range(2 if twice else 1)]
        received = [self.noted(sent, number, copy.result()) for copy in copies]
        self.faults["repeated"] += twice
        if sent.path != POLL and attempt == 1:
            self.faults["502"] += 1
            self.fail(request)
        elif dropped and attempt <= 2:
            self.faults["dropped"] += 1
            self.drop(request)
        else:
            self.reply(request, draw.choice(received))


@pytest.fixture
def network(service: Service) -> Iterator[BadNetwork]:
    bad = EveryoneTwice(service.base_url)
    yield bad
    bad.close()


def _script(client: tinker.ServiceClient) -> list[list[list[float]]]:
    """Train, with a sampler made and used on the way: what each of them, and the run at last, gives the data."""
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=4).result(60)
    scores = []
    for step in range(1, STEPS + 1):
        forward = run.forward_backward(DATA, "cross_entropy")
        taken = run.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-8))
        forward.result(60)
        taken.result(60)
        if step % SAVE_EVERY == 0:
            sampler = run.save_weights_and_get_sampling_client().result(60)
            scores.append([sampler.compute_logprobs(datum.model_input) for datum in DATA])
    final = logprobs(run, DATA)
    return [*([score.result(60)[1:] for score in scored] for scored in scores), final]  # type: ignore[list-item]


def test_nothing_is_trained_twice_through_a_bad_network(
    network: BadNetwork, connect: Callable[..., tinker.ServiceClient]
) -> None:
    quiet = _script(connect())
    disturbed = _script(tinker.ServiceClient(base_url=network.url, api_key="tml-bad-network"))
    for expected, got in zip(quiet, disturbed, strict=True):
        assert largest_gap(expected, got) < 1e-3

    routes = Counter(path.rpartition("/")[2] for path, _ in network.answers)
    saves = STEPS // SAVE_EVERY
    assert routes["forward_backward"] == STEPS + 1 and routes["optim_step"] == STEPS
    assert routes["save_weights_for_sampler"] == saves and routes["asample"] == saves * len(DATA)
    assert network.faults["502"] == routes.total()
    assert network.faults["dropped"] >= 5 and network.faults["repeated"] >= 20
    assert [route for route, bodies in network.answers.items() if len(bodies) > 1] == []
