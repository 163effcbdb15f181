"""`rediss://`: redis-py and Celery check the certificate, unless they are told to take one that nobody vouches for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis.asyncio
from celery import Celery
from redis.exceptions import ConnectionError as RedisConnectionError

from app.fleet.queues import celery_settings
from app.settings import Settings
from tests.services import RedisServer
from tests.tls_front import self_signed, tls_front


@pytest.fixture
def url(shared_redis: RedisServer, tmp_path: Path) -> Iterator[str]:
    with tls_front(shared_redis.port, self_signed(tmp_path)) as port:
        yield f"rediss://127.0.0.1:{port}/0"


def settings(url: str, **values: str) -> Settings:
    return Settings(redis_url=url, **values)  # type: ignore[arg-type]


def send_a_doorbell(settings: Settings) -> int:
    """One message through Celery and back, as publishers and workers do it; returns how many were waiting."""
    with Celery(set_as_current=False) as app:
        app.conf.update(celery_settings(settings), task_publish_retry=False)
        app.send_task("tinker.forward", args=["run"], queue="wake.tls-test")
        with app.connection_for_read() as connection, connection.SimpleQueue("wake.tls-test", no_ack=True) as waiting:
            count = waiting.qsize()
            waiting.get(timeout=5)
            return int(count)


def test_a_self_signed_certificate_is_refused(url: str) -> None:
    with redis.Redis.from_url(settings(url).redis_url) as client, pytest.raises(RedisConnectionError, match="CERT"):
        client.ping()
    with pytest.raises(Exception, match=r"(?i)certificate"):
        send_a_doorbell(settings(url))


def test_and_is_taken_where_the_setting_says_so(url: str) -> None:
    lenient = settings(url, redis_cert_reqs="none")

    async def ping() -> bool:
        async with redis.asyncio.Redis.from_url(lenient.redis_url) as client:
            return bool(await client.ping())

    with redis.Redis.from_url(lenient.redis_url) as client:
        assert client.ping()
    assert asyncio.run(ping())
    assert send_a_doorbell(lenient) == 1


def test_what_the_url_says_itself_wins(url: str) -> None:
    own = settings(f"{url}?ssl_cert_reqs=none")
    assert own.redis_url.count("ssl_cert_reqs") == 1
    assert send_a_doorbell(own) == 1


def test_a_plain_url_stays_as_it_is() -> None:
    assert settings("redis://h/0", redis_cert_reqs="none").redis_url == "redis://h/0"
