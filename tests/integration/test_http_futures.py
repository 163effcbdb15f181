"""`retrieve_future`: held while pending, answered again and again, and never a 5xx."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from conftest import PROTOBUF, Api, running
from sqlalchemy import delete, update
from sqlalchemy.engine import make_url

from app.fleet.models import Worker
from app.futures import routes
from app.futures.waiters import DONE_CHANNEL
from app.runs.log import Failure
from app.runs.models import Operation
from tests.services import PostgresServer, wait_for

Batch = Callable[..., bytes]


def submitted(api: Api, batch: Batch, *seq_ids: int) -> str:
    """A run with these batches waiting."""
    model_id = api.run()
    for seq_id in seq_ids:
        assert api.forward_backward(batch(model_id, seq_id)).status_code == 200
    return model_id


def test_a_pending_future_is_held_and_then_told_to_ask_again(api: Api, batch: Batch) -> None:
    model_id = submitted(api, batch, 1)
    began = time.monotonic()
    answer = api.poll(f"{model_id}:1")
    assert time.monotonic() - began >= 0.2
    assert answer.status_code == 408
    assert answer.json() == {"type": "try_again", "request_id": f"{model_id}:1", "queue_state": "active"}


def test_a_future_behind_a_gap_says_what_it_waits_for(api: Api, batch: Batch) -> None:
    model_id = submitted(api, batch, 1, 3)
    assert f"seq_id 2 of {model_id}" in api.poll(f"{model_id}:3").json()["queue_state_reason"]


def test_a_future_that_no_worker_can_take_says_so(api: Api, batch: Batch) -> None:
    model_id = submitted(api, batch, 1)
    with api.database.write() as session:
        session.execute(delete(Worker))
    answer = api.poll(f"{model_id}:1").json()
    assert answer["queue_state"] == "paused_capacity"
    assert "no train worker of pool tiny" in answer["queue_state_reason"]


@pytest.mark.parametrize(("kind", "content_type"), [("proto", PROTOBUF), ("json", "application/json")])
def test_a_result_comes_as_it_was_made_and_again(api: Api, batch: Batch, kind: str, content_type: str) -> None:
    model_id = submitted(api, batch, 1)
    api.finish(model_id, 1, result=b'{"metrics":{}}', kind=kind)
    for _ in range(3):
        answer = api.poll(f"{model_id}:1")
        assert (answer.status_code, answer.content) == (200, b'{"metrics":{}}')
        assert answer.headers["content-type"] == content_type


def test_a_failure_is_json_with_its_category(api: Api, batch: Batch) -> None:
    model_id = submitted(api, batch, 1)
    api.finish(model_id, 1, failure=Failure("the server is to blame", "server"))
    answer = api.poll(f"{model_id}:1")
    assert (answer.status_code, answer.json()) == (200, {"error": "the server is to blame", "category": "server"})


def test_a_large_result_is_read_from_its_blob(api: Api, batch: Batch, tmp_path: Path) -> None:
    model_id = submitted(api, batch, 1)
    api.finish(model_id, 1, kind="proto")
    (tmp_path / "blobs" / "results").mkdir(parents=True)
    (tmp_path / "blobs" / "results" / "r1").write_bytes(b"large")
    with api.database.write() as session:
        session.execute(update(Operation).where(Operation.seq_id == 1).values(result=None, result_blob="results/r1"))
    assert api.poll(f"{model_id}:1").content == b"large"


def test_a_result_that_is_no_longer_kept_is_gone(api: Api, batch: Batch) -> None:
    model_id = submitted(api, batch, 1, 2)
    api.finish(model_id, 1)
    api.finish(model_id, 2)
    with api.database.write() as session:
        session.execute(update(Operation).where(Operation.seq_id == 1).values(result=None, result_kind=None))
        session.execute(update(Operation).where(Operation.seq_id == 2).values(result=None, result_blob="results/no"))
    assert [api.poll(f"{model_id}:{n}").status_code for n in (1, 2)] == [410, 410]


def test_an_unknown_future_and_somebody_elses_are_not_there(api: Api, batch: Batch) -> None:
    model_id = submitted(api, batch, 1)
    for request_id in (f"{model_id}:2", "never", "s:train:0:x", "s:sample:0:0"):
        assert api.poll(request_id).status_code == 404
    assert api.poll(f"{model_id}:1", who="bob").status_code == 404


def waiting(api: Api, request_id: str) -> bool:
    services = api.client.app.state.services  # type: ignore[attr-defined]
    return request_id in services.waiters._waiting


@pytest.fixture
def patient(configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path) -> Iterator[Api]:
    """A service that holds polls for long and looks into its stores only when it must."""
    with running(configure, sqlite_url, redis_url, tmp_path, sweep_s=3600, poll_hold_s=30) as service:
        yield service


def test_a_held_poll_is_answered_by_the_notice(patient: Api, batch: Batch, redis_url: str) -> None:
    model_id = submitted(patient, batch, 1)
    request_id = f"{model_id}:1"
    with ThreadPoolExecutor(1) as pool, redis.Redis.from_url(redis_url) as publisher:
        polling = pool.submit(patient.poll, request_id)
        wait_for(lambda: waiting(patient, request_id))
        patient.finish(model_id, 1, kind="proto", result=b"done")
        wait_for(lambda: publisher.publish(DONE_CHANNEL, request_id) and polling.done())
        assert polling.result().content == b"done"


def test_a_notice_for_a_future_that_is_not_done_ends_no_poll(patient: Api, batch: Batch, redis_url: str) -> None:
    model_id = submitted(patient, batch, 1)
    request_id = f"{model_id}:1"
    with ThreadPoolExecutor(1) as pool, redis.Redis.from_url(redis_url) as publisher:
        polling = pool.submit(patient.poll, request_id)
        wait_for(lambda: waiting(patient, request_id))
        wait_for(lambda: publisher.publish(DONE_CHANNEL, request_id))
        patient.finish(model_id, 1, result=b'{"late":1}')
        wait_for(lambda: publisher.publish(DONE_CHANNEL, request_id) and polling.done())
        assert polling.result().json() == {"late": 1}


def test_a_stopping_service_lets_its_polls_go(patient: Api, batch: Batch) -> None:
    model_id = submitted(patient, batch, 1)
    with ThreadPoolExecutor(1) as pool:
        polling = pool.submit(patient.poll, f"{model_id}:1")
        wait_for(lambda: waiting(patient, f"{model_id}:1"))
        services = patient.client.app.state.services  # type: ignore[attr-defined]
        assert patient.client.portal is not None
        patient.client.portal.call(services.waiters.stop)
        assert polling.result().status_code == 408


@pytest.fixture
def outage(
    configure: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    postgres_url: str,
    shared_postgres: PostgresServer,
    redis_url: str,
    tmp_path: Path,
) -> Iterator[tuple[Api, Callable[[], None], Callable[[], None]]]:
    """A service on Postgres, what begins an outage of the database, and what ends it."""
    monkeypatch.setattr(routes, "_OUTAGE_HOLD_S", 0.05)
    name = make_url(postgres_url).database
    assert name is not None
    with running(configure, postgres_url, redis_url, tmp_path) as service:
        yield service, lambda: shared_postgres.lock(name), lambda: shared_postgres.unlock(name)


Outage = tuple[Api, Callable[[], None], Callable[[], None]]


def test_a_poll_in_an_outage_is_held_and_told_to_ask_again(outage: Outage, batch: Batch) -> None:
    api, begin, end = outage
    model_id = submitted(api, batch, 1)
    begin()
    answers = [api.poll(f"{model_id}:1") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [408] * 3
    assert "cannot reach its database" in answers[0].json()["queue_state_reason"]
    end()
    api.finish(model_id, 1, result=b'{"after":1}')
    assert api.poll(f"{model_id}:1").json() == {"after": 1}


def test_a_submit_in_an_outage_is_told_to_come_again_and_consumes_nothing(outage: Outage, batch: Batch) -> None:
    api, begin, end = outage
    model_id = submitted(api, batch, 1)
    begin()
    answer = api.forward_backward(batch(model_id, 2))
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    end()
    assert api.forward_backward(batch(model_id, 2)).status_code == 200
    assert api.operation(model_id, 2).state == "accepted"


def test_a_poll_while_redis_is_away_is_no_5xx(
    configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch, sqlite_url: str, own_redis: object, tmp_path: Path
) -> None:
    monkeypatch.setattr(routes, "_OUTAGE_HOLD_S", 0.05)
    with running(configure, sqlite_url, own_redis.url, tmp_path) as api:  # type: ignore[attr-defined]
        session_id = api.session()
        sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = api.ok("create_sampling_session", sampling)["sampling_session_id"]
        body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
        request_id = api.ok("asample", body)["request_id"]
        model_id = api.run()
        own_redis.stop()  # type: ignore[attr-defined]
        assert api.poll(request_id).status_code == 408
        assert api.poll(f"{model_id}:0").status_code == 200
        assert api.post("asample", body | {"seq_id": 1}).status_code == 503
