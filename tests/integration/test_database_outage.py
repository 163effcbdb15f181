"""The database is really away, or locked by somebody else: clients are told to come again, and all heals by itself."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import event
from sqlalchemy.exc import OperationalError

from app.checkpoints import service as checkpoints
from app.db import Database, get_database
from app.futures import polls
from app.migrate import upgrade
from app.runs.log import DONE
from tests.integration.conftest import Api, running
from tests.services import PostgresServer, postgres_server, wait_for
from tests.unit.workers.train.train_lab import Lab, assert_close, state_of
from workers.train.loop import TrainLoop

Batch = Callable[..., bytes]


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[PostgresServer]:
    """A Postgres that the tests may stop and start."""
    with postgres_server(keeps_commits=True) as server:
        upgrade(server.url())
        yield server


@pytest.fixture(autouse=True)
def _short_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polls, "OUTAGE_HOLD_S", 0.05)


@contextmanager
def training(api: Api, folder: Path) -> Iterator[tuple[Lab, TrainLoop]]:
    """A train worker that turns its cycles by itself."""
    database = Database(api.database.url, pool_size=2)
    lab = Lab(database, folder, claim_interval_s=0.05)
    loop = lab.worker()
    loop._thread.start()
    try:
        yield lab, loop
    finally:
        loop._stopping.set()
        loop.ring()
        loop._thread.join(10)
        lab.close()
        database.dispose()


def finished(api: Api, model_id: str, seq_id: int) -> bool:
    return api.operation(model_id, seq_id).state == DONE


def test_a_postgres_that_dies_and_comes_back_costs_only_time(
    configure: Callable[..., None], own_postgres: PostgresServer, redis_url: str, tmp_path: Path, batch: Batch
) -> None:
    with (
        running(configure, own_postgres.url(), redis_url, tmp_path, poll_hold_s=20) as api,
        training(api, tmp_path) as (lab, loop),
        ThreadPoolExecutor(1) as pool,
    ):
        session_id = api.session()
        model_id = str(api.create(session_id)["model_id"])
        assert api.forward_backward(batch(model_id, 1)).status_code == 200
        wait_for(lambda: finished(api, model_id, 1))
        assert api.forward_backward(batch(model_id, 3)).status_code == 200
        held = pool.submit(api.poll, f"{model_id}:3")  # it waits for operation 2 and for the database
        services = api.client.app.state.services  # type: ignore[attr-defined]
        wait_for(lambda: services.waiters.count)

        own_postgres.crash()
        for answer in (
            api.forward_backward(batch(model_id, 2)),
            api.get(f"/api/v1/training_runs/{model_id}"),
            api.post("session_heartbeat", {"session_id": session_id}),
        ):
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["detail"] == "the database cannot be reached; try again"
        assert api.poll(f"{model_id}:1").status_code == 408
        wait_for(lambda: any(entry["event"] == "cycle_failed" for entry in lab.logs))

        own_postgres.start()
        answers: list[httpx.Response] = []

        def accepted() -> bool:
            answers.append(api.forward_backward(batch(model_id, 2)))
            return answers[-1].status_code == 200

        wait_for(accepted)
        assert {answer.status_code for answer in answers} <= {200, 503}
        wait_for(lambda: finished(api, model_id, 3))
        assert held.result(30).status_code in (200, 408)
        assert api.poll(f"{model_id}:3").status_code == 200
        assert loop._thread.is_alive()


@contextmanager
def impatience(database: Database) -> Iterator[None]:
    """SQLite waits for a lock for a moment only, not for twenty seconds."""

    def hurry(connection: Any, *_: object) -> None:
        connection.execute("PRAGMA busy_timeout=20")

    event.listen(database.engine, "checkout", hurry)
    yield
    event.remove(database.engine, "checkout", hurry)
    database.dispose()


@contextmanager
def locked(url: str) -> Iterator[None]:
    """Somebody else writes to the SQLite file, and does not end."""
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    yield
    connection.rollback()
    connection.close()


def test_a_locked_sqlite_is_an_outage_and_reads_go_on(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path, batch: Batch
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path) as api:
        model_id = api.run()
        with impatience(get_database()), locked(sqlite_url):
            answer = api.forward_backward(batch(model_id, 1))
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert api.poll(f"{model_id}:0").status_code == 200
            assert api.get(f"/api/v1/training_runs/{model_id}").status_code == 200
        assert api.forward_backward(batch(model_id, 1)).status_code == 200


def test_a_worker_waits_for_a_locked_sqlite_and_does_everything_once(sqlite_url: str, tmp_path: Path) -> None:
    database = Database(sqlite_url)
    lab = Lab(database, tmp_path, claim_interval_s=0.01)
    loop, client = lab.worker(), lab.client()
    lab.work(loop)
    _, step = client.train(1)
    with impatience(database), locked(sqlite_url):
        loop._thread.start()
        wait_for(lambda: sum(entry["event"] == "cycle_failed" for entry in lab.logs) >= 3)
    wait_for(lambda: client.operation(step).state == DONE)
    loop._stopping.set()
    loop._thread.join(10)
    second = lab.worker()
    client.train(2)
    lab.work(second)
    assert client.row.crash_count == 0
    assert_close(state_of(second, client), client.alone)
    lab.close()
    database.dispose()


def test_a_save_that_finds_the_database_away_is_done_again(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection breaks while the save looks whether its name is free: nobody is to blame, nothing fails."""
    loop, client, other = lab.worker(), lab.client(), lab.client(seed=2)
    client.train(1)
    lab.work(loop)
    real, broken = checkpoints.exists, []

    def breaking(*args: Any) -> bool:
        if not broken:
            broken.append(True)
            raise OperationalError("SELECT", {}, Exception("the connection is closed"))
        return real(*args)

    monkeypatch.setattr(checkpoints, "exists", breaking)
    saved = client.save("name")
    other.train(2)
    lab.work(loop)
    assert broken and client.operation(saved).state == DONE
    for one in (client, other):
        assert one.row.crash_count == 0
        assert_close(state_of(loop, one), one.alone)
