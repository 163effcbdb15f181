"""What platforms and people ask a server: does it live, is it ready, what is missing, what does it serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import delete, update
from sqlalchemy.engine import make_url

from app.db import database_clock
from app.fleet.models import Worker
from app.fleet.overview import seen_workers
from app.settings import get_settings
from tests.factories import add_model, add_worker
from tests.integration.conftest import Api, running
from tests.services import PostgresServer, RedisServer


def health(api: Api) -> tuple[int, list[str]]:
    answer = api.client.get("/api/v1/healthz")
    return answer.status_code, answer.json().get("missing", [])


def test_a_whole_service_is_healthy(each_api: Api) -> None:
    for path in ("/livez", "/readyz", "/api/v1/healthz"):
        answer = each_api.client.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


def test_a_service_without_workers_says_so(api: Api) -> None:
    with api.database.write() as session:
        session.execute(delete(Worker))
    assert health(api) == (503, ["no worker has registered a model"])


def fall_silent(api: Api, silence_s: float) -> None:
    with api.database.write() as session:
        session.execute(update(Worker).values(last_seen=database_clock() - silence_s))


def test_a_silent_worker_does_not_count(api: Api) -> None:
    fall_silent(api, 13)
    assert health(api) == (503, ["no live sample worker for tiny", "no live train worker for tiny"])


def test_a_worker_with_long_leases_may_be_silent_for_longer(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path, lease_s=60) as api:
        fall_silent(api, 61)
        with api.database.read() as session:
            assert [one.is_alive for one in seen_workers(session, silence_s=get_settings().worker_silence_s)] == [True]
        assert health(api) == (200, [])
        assert "queue_state_reason" not in api.poll(f"{api.create(api.session())['model_id']}:0").json()
        fall_silent(api, 91)
        assert health(api)[0] == 503


def test_a_role_that_no_worker_has_is_named(api: Api) -> None:
    with api.database.write() as session:
        add_worker(session, pool="large", roles=["train"])
    assert health(api) == (503, ["no sample worker for large"])


def test_a_broker_that_is_away_is_named_and_the_service_stays_ready(
    configure: Callable[..., None], sqlite_url: str, own_redis: RedisServer, tmp_path: Path
) -> None:
    with running(configure, sqlite_url, own_redis.url, tmp_path) as api:
        own_redis.stop()
        assert health(api) == (503, ["the broker does not answer"])
        assert api.client.get("/readyz").status_code == 200


def test_a_database_that_is_away_is_named_and_the_process_lives(
    configure: Callable[..., None], postgres_url: str, shared_postgres: PostgresServer, redis_url: str, tmp_path: Path
) -> None:
    with running(configure, postgres_url, redis_url, tmp_path) as api:
        shared_postgres.lock(str(make_url(postgres_url).database))
        assert health(api) == (503, ["the database does not answer"])
        assert api.client.get("/readyz").status_code == 503
        assert api.client.get("/livez").status_code == 200


def test_models_are_listed_by_each_of_their_names(api: Api) -> None:
    with api.database.write() as session:
        add_model(session, pool="large", names=["org/large", "large"])
    models = api.get("/api/v1/get_server_capabilities").json()["supported_models"]
    assert [model["model_name"] for model in models] == ["org/large", "large", "tiny"]
    assert all(model["max_context_length"] > 0 for model in models)


def test_a_model_can_do_what_its_workers_do(api: Api) -> None:
    with api.database.write() as session:
        add_model(session, pool="large", names=["large"])
        add_model(session, pool="lonely", names=["lonely"])
        add_worker(session, pool="large", roles=["sample"])
    models = api.get("/api/v1/get_server_capabilities").json()["supported_models"]
    can = {model["model_name"]: (model["trainable"], model["sampleable"]) for model in models}
    assert can == {"tiny": (True, True), "large": (False, True), "lonely": (False, False)}


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/api/v1/healthz"])
def test_health_needs_no_key(api: Api, path: str) -> None:
    assert api.client.get(path).status_code == 200


def test_a_path_with_a_slash_too_many_is_not_redirected(api: Api) -> None:
    assert api.client.get("/livez/", follow_redirects=False).status_code == 404
