"""A doorbell that cannot be sent costs its caller nothing: it is counted, and never an error."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from app.fleet.doorbells import DoorbellPublisher
from app.settings import Settings
from app.up.network import free_port
from tests.services import wait_for


@pytest.fixture
def away() -> Iterator[DoorbellPublisher]:
    """A publisher whose broker nobody listens at."""
    publisher = DoorbellPublisher(Settings(redis_url=f"redis://127.0.0.1:{free_port()}/0"))
    publisher.start()
    yield publisher
    publisher.stop()


def ring(publisher: DoorbellPublisher) -> None:
    publisher.ring_train(kind="optim_step", model_id="s:train:0", pool="tiny", worker_id=None)


def test_a_broker_that_is_away_is_counted(away: DoorbellPublisher) -> None:
    ring(away)
    away.ring_sample(request_id="s:sample:0:0", pool="tiny")
    wait_for(lambda: away.lost == 2)


def test_ringing_does_not_wait_for_the_broker(away: DoorbellPublisher) -> None:
    began = time.monotonic()
    for _ in range(100):
        ring(away)
    assert time.monotonic() - began < 0.5


def test_a_full_queue_is_counted() -> None:
    publisher = DoorbellPublisher(Settings(), capacity=1)  # not started: nothing leaves the queue
    for _ in range(3):
        ring(publisher)
    assert publisher.lost == 2
