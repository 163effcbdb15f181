"""Doorbells on a real broker: which queue they ring at, and that they ring again after it was away."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest
import redis

from app.fleet.doorbells import DoorbellPublisher
from app.settings import Settings
from tests.services import RedisServer, wait_for


@pytest.fixture
def broker(own_redis: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_redis.url) as client:
        yield client


@pytest.fixture
def publisher(own_redis: RedisServer) -> Iterator[DoorbellPublisher]:
    publisher = DoorbellPublisher(Settings(redis_url=own_redis.url))
    publisher.start()
    yield publisher
    publisher.stop()


def rung(broker: redis.Redis, queue: str) -> list[tuple[str, list[str]]]:
    """Tasks and arguments of the messages in a queue, oldest first."""
    messages = [json.loads(raw) for raw in reversed(broker.lrange(queue, 0, -1))]  # type: ignore[arg-type]
    assert all(message["content-type"] == "application/json" for message in messages)
    bodies = [json.loads(base64.b64decode(message["body"])) for message in messages]
    return [(m["headers"]["task"], body[0]) for m, body in zip(messages, bodies, strict=True)]


def ring(publisher: DoorbellPublisher, worker_id: str | None = None, model_id: str = "s:train:0") -> None:
    publisher.ring_train(kind="forward_backward", model_id=model_id, pool="tiny", worker_id=worker_id)


def test_a_run_that_nobody_holds_rings_at_its_pool(publisher: DoorbellPublisher, broker: redis.Redis) -> None:
    ring(publisher)
    wait_for(lambda: broker.llen("train.tiny"))
    assert rung(broker, "train.tiny") == [("tinker.forward_backward", ["s:train:0"])]


def test_a_run_that_a_worker_holds_rings_at_that_worker(publisher: DoorbellPublisher, broker: redis.Redis) -> None:
    ring(publisher, worker_id="w1")
    wait_for(lambda: broker.llen("wake.w1"))
    assert broker.llen("train.tiny") == 0


def test_nothing_is_left_of_a_bell_that_was_heard(publisher: DoorbellPublisher, broker: redis.Redis) -> None:
    ring(publisher, worker_id="w1")
    wait_for(lambda: broker.rpop("wake.w1"))
    assert broker.keys() == []


def test_a_sample_goes_to_the_samplers_of_its_pool(publisher: DoorbellPublisher, broker: redis.Redis) -> None:
    publisher.ring_sample(request_id="s:sample:0:7", pool="tiny")
    wait_for(lambda: broker.llen("sample.tiny"))
    assert rung(broker, "sample.tiny") == [("tinker.sample", ["s:sample:0:7"])]


def test_what_waits_is_sent_before_it_stops(own_redis: RedisServer, broker: redis.Redis) -> None:
    publisher = DoorbellPublisher(Settings(redis_url=own_redis.url))
    for number in range(20):
        ring(publisher, model_id=f"s:train:{number}")
    publisher.start()
    publisher.stop(timeout_s=30)
    assert [arguments for _, arguments in rung(broker, "train.tiny")] == [[f"s:train:{n}"] for n in range(20)]


def test_rings_for_one_run_that_wait_together_become_one(own_redis: RedisServer, broker: redis.Redis) -> None:
    publisher = DoorbellPublisher(Settings(redis_url=own_redis.url))
    for _ in range(20):
        ring(publisher)
    publisher.start()
    publisher.stop(timeout_s=30)
    assert broker.llen("train.tiny") == 1


def test_samples_that_wait_together_share_messages_of_a_few(own_redis: RedisServer, broker: redis.Redis) -> None:
    publisher = DoorbellPublisher(Settings(redis_url=own_redis.url))
    ids = [f"s:sample:0:{number}" for number in range(20)]
    for request_id in ids:
        publisher.ring_sample(request_id=request_id, pool="tiny")
    publisher.ring_sample(request_id="s:sample:0:99", pool="tiny", worker_id="w1")
    publisher.start()
    publisher.stop(timeout_s=30)
    assert rung(broker, "sample.tiny") == [("tinker.sample", ids[:16]), ("tinker.sample", ids[16:])]
    assert rung(broker, "wake.w1") == [("tinker.sample", ["s:sample:0:99"])]


def test_it_rings_again_once_the_broker_is_back(
    publisher: DoorbellPublisher, own_redis: RedisServer, broker: redis.Redis
) -> None:
    ring(publisher)
    wait_for(lambda: broker.llen("train.tiny") == 1)
    own_redis.stop()
    ring(publisher)
    wait_for(lambda: publisher.lost == 1)
    own_redis.start()
    ring(publisher, worker_id="w1")
    wait_for(lambda: broker.llen("wake.w1") == 1)


def test_it_rings_again_after_the_broker_had_no_memory_left(publisher: DoorbellPublisher, broker: redis.Redis) -> None:
    broker.config_set("maxmemory", "1")
    ring(publisher)
    wait_for(lambda: publisher.lost == 1)
    broker.config_set("maxmemory", "0")
    ring(publisher)
    wait_for(lambda: broker.llen("train.tiny") == 1)
