"""`retrieve_future`: held while pending, answered again and again, and never a 5xx."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import redis
from sqlalchemy import delete, update
from sqlalchemy.engine import make_url

from app.fleet.models import Worker
from app.futures import polls
from app.futures.waiters import DONE_CHANNEL
from app.runs.log import Failure
from app.runs.models import Operation
from app.sampling.keys import result_key
from app.sampling.store import SampleAnswer, SampleDesk
from tests.factories import POOL
from tests.integration.conftest import PROTOBUF, Api, running
from tests.services import PostgresServer, RedisServer, wait_for

Batch = Callable[..., bytes]


def submitted(api: Api, batch: Batch, *seq_ids: int) -> str:
    """A run with these batches waiting."""
    model_id = api.run()
    for seq_id in seq_ids:
        assert api.forward_backward(batch(model_id, seq_id)).status_code == 200
    return model_id


def sampled(api: Api) -> tuple[str, str]:
    """A sampling session, and a sample of it that waits."""
    body = {"session_id": api.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = str(api.ok("create_sampling_session", body)["sampling_session_id"])
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}
    return sampler, str(api.ok("asample", body)["request_id"])


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


def test_a_result_that_cannot_be_read_is_a_failed_future(api: Api, batch: Batch) -> None:
    model_id = submitted(api, batch, 1)
    api.finish(model_id, 1, result=b"\xff\xff no protobuf", kind="proto")
    answer = api.post("retrieve_future", {"request_id": f"{model_id}:1"})  # in JSON, so it has to be decoded
    assert answer.status_code == 200
    assert answer.json()["category"] == "server"


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
    monkeypatch.setattr(polls, "OUTAGE_HOLD_S", 0.05)
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
    monkeypatch.setattr(polls, "OUTAGE_HOLD_S", 0.05)
    with running(configure, sqlite_url, own_redis.url, tmp_path) as api:  # type: ignore[attr-defined]
        sampler, request_id = sampled(api)
        model_id = api.run()
        own_redis.stop()  # type: ignore[attr-defined]
        assert api.poll(request_id).status_code == 408
        assert api.poll(f"{model_id}:0").status_code == 200
        body = {"sampling_session_id": sampler, "seq_id": 1, "prompt": {"chunks": [{"tokens": [1]}]}}
        assert api.post("asample", body).status_code == 503


@pytest.mark.parametrize("away", ["redis", "postgres"])
def test_polls_of_one_store_are_answered_while_the_other_is_away(
    configure: Callable[..., None],
    postgres_url: str,
    shared_postgres: PostgresServer,
    own_redis: RedisServer,
    batch: Batch,
    tmp_path: Path,
    away: str,
) -> None:
    """No notice tells of either end: the service has to look."""
    with (
        running(configure, postgres_url, own_redis.url, tmp_path, poll_hold_s=29) as api,
        ThreadPoolExecutor(2) as pool,
    ):
        services = api.client.app.state.services  # type: ignore[attr-defined]
        (_, sample), pass_ = sampled(api), f"{submitted(api, batch, 1)}:1"
        services.waiters._expected.clear()  # so that the polls look once
        polling = {request_id: pool.submit(api.poll, request_id) for request_id in (sample, pass_)}
        wait_for(lambda: services.waiters.count == 2)
        if away == "redis":
            own_redis.stop()
            api.finish(pass_.removesuffix(":1"), 1, kind="proto", result=b"done")
        else:
            shared_postgres.lock(str(make_url(postgres_url).database))
            with redis.Redis.from_url(own_redis.url) as client:
                client.set(result_key(sample), SampleAnswer("proto", b"done").pack())
        try:
            assert polling[pass_ if away == "redis" else sample].result(timeout=15).content == b"done"
        finally:
            services.waiters.release()


# -- large results


@pytest.fixture
def modest(configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path) -> Iterator[Api]:
    """A service for which 2 KiB are much."""
    with running(configure, sqlite_url, redis_url, tmp_path, metadata_first_bytes=2048) as service:
        yield service


def first_poll(api: Api, request_id: str, **fields: object) -> httpx.Response:
    """A poll as the SDK begins with."""
    body = {"request_id": request_id, "allow_metadata_only": True} | fields
    return api.post("retrieve_future", body, accept=PROTOBUF)


def finished(api: Api, batch: Batch, where: str, payload: bytes, data_dir: Path) -> str:
    """A future whose result is stored in its row, in a blob, or in Redis."""
    if where == "redis":
        _, request_id = sampled(api)
        with redis.Redis.from_url(api.client.app.state.services.settings.redis_url) as client:  # type: ignore[attr-defined]
            desk = SampleDesk(client, pool=POOL, worker_id="w", claim_s=60, result_ttl_s=900)
            desk.finish([(request_id, SampleAnswer("proto", payload))])
        return request_id
    model_id = submitted(api, batch, 1)
    api.finish(model_id, 1, kind="proto", result=payload)
    if where == "blob":
        (data_dir / "blobs" / "results").mkdir(parents=True)
        (data_dir / "blobs" / "results" / "r1").write_bytes(payload)
        values = {"result": None, "result_blob": "results/r1"}
        with api.database.write() as session:
            session.execute(update(Operation).where(Operation.seq_id == 1).values(**values))
    return f"{model_id}:1"


@pytest.mark.parametrize("where", ["row", "blob", "redis"])
def test_a_large_result_is_announced_before_it_is_sent(modest: Api, batch: Batch, where: str, tmp_path: Path) -> None:
    request_id = finished(modest, batch, where, b"x" * 2049, tmp_path)
    announced = {"status": "complete_metadata", "response_payload_size": 2049}
    assert [first_poll(modest, request_id).json() for _ in range(2)] == [announced] * 2
    assert modest.poll(request_id).content == b"x" * 2049


@pytest.mark.parametrize("where", ["row", "blob", "redis"])
def test_a_result_that_is_not_large_comes_at_once(modest: Api, batch: Batch, where: str, tmp_path: Path) -> None:
    request_id = finished(modest, batch, where, b"x" * 2048, tmp_path)
    assert first_poll(modest, request_id).content == b"x" * 2048


def test_a_failure_is_told_at_once_however_long_it_is(modest: Api, batch: Batch) -> None:
    model_id = submitted(modest, batch, 1)
    modest.finish(model_id, 1, failure=Failure("no" * 2000, "user"))
    assert first_poll(modest, f"{model_id}:1").json()["error"] == "no" * 2000


@pytest.mark.parametrize("where", ["blob", "redis"])
def test_a_result_of_many_megabytes_comes_whole_and_with_its_length(
    api: Api, batch: Batch, where: str, tmp_path: Path
) -> None:
    payload = bytes(range(256)) * 4096 * 12 + b"end"
    request_id = finished(api, batch, where, payload, tmp_path)
    answer = api.poll(request_id)
    assert answer.headers["content-length"] == str(len(payload))
    assert answer.content == payload


# -- many polls


def test_waiting_polls_hold_no_database_connection(
    configure: Callable[..., None], postgres_url: str, redis_url: str, tmp_path: Path, batch: Batch
) -> None:
    count = 60
    with running(configure, postgres_url, redis_url, tmp_path, sweep_s=0.5, poll_hold_s=30) as api:
        services = api.client.app.state.services  # type: ignore[attr-defined]
        model_id = submitted(api, batch, *range(1, count + 1))
        services.waiters._expected.clear()  # as in a process that has not accepted them: every poll looks first
        held = api.database.engine.pool
        with ThreadPoolExecutor(count) as pool:
            polls = [pool.submit(api.poll, f"{model_id}:{seq_id}") for seq_id in range(1, count + 1)]
            wait_for(lambda: len(services.waiters._waiting) == count)
            wait_for(lambda: held.checkedout() == 0)  # type: ignore[attr-defined]
            assert api.post("session_heartbeat", {"session_id": model_id.partition(":")[0]}).status_code == 200
            assert not any(poll.done() for poll in polls)
            assert api.client.portal is not None
            api.client.portal.call(services.waiters.stop)
            assert {poll.result().status_code for poll in polls} == {408}


def test_many_polls_share_few_connections_to_redis(api: Api) -> None:
    count = 100
    body = {"session_id": api.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = api.ok("create_sampling_session", body)["sampling_session_id"]
    body = {"sampling_session_id": sampler, "prompt": {"chunks": [{"tokens": [1]}]}}
    request_ids = [str(api.ok("asample", body | {"seq_id": number})["request_id"]) for number in range(count)]
    api.client.app.state.services.waiters._expected.clear()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(api.poll, request_ids))
    assert {answer.status_code for answer in answers} == {408}
    assert not any("queue_state_reason" in answer.json() for answer in answers)
