"""One round of tidying, on both databases: what time has ended goes, everything else stays."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import redis
import redis.asyncio
from sqlalchemy import select, update

from app.checkpoints.models import Checkpoint, Snapshot
from app.custom_losses.models import CustomLoss
from app.db import Database, database_clock, get_database, utc_now
from app.errors import Gone
from app.fleet.models import Worker
from app.fleet.queues import wake_queue
from app.futures.waiters import DONE_CHANNEL
from app.runs import log
from app.runs.log import FAILED, Finished, Payload
from app.runs.models import Operation, Run
from app.sampling.keys import request_key, unfinished_key
from app.sampling.store import Depths, SampleInbox
from app.sessions.models import ClientSession
from app.sessions.service import heartbeat
from app.storage.blobs import get_blob_store
from app.up.network import free_port
from tests.factories import POOL, add_checkpoint, add_model, add_operation, add_worker, new_run
from workers.janitor import collect, tidy
from workers.watch import UP_SINCE_KEY


@pytest.fixture
def database(configure: Callable[..., None], database_url: str, redis_url: str, tmp_path: Path) -> Database:
    """The database that this process's settings name."""
    configure(DATABASE_URL=database_url, REDIS_URL=redis_url, TINWORKS_DATA_DIR=tmp_path)
    return get_database()


@pytest.fixture
def run(database: Database) -> Run:
    return new_run(database)


def test_expired_checkpoints_go_and_their_snapshots_stay(database: Database, run: Run) -> None:
    with database.write() as session:
        add_checkpoint(session, run, "old", expires_at=utc_now() - timedelta(seconds=1))
        add_checkpoint(session, run, "young", expires_at=utc_now() + timedelta(hours=1))
        add_checkpoint(session, run, "forever")
    tidy()
    with database.read() as session:
        assert set(session.scalars(select(Checkpoint.name))) == {"young", "forever"}
        assert len(session.scalars(select(Snapshot.id)).all()) == 3


@contextmanager
def web_that_listens(redis_url: str) -> Iterator[redis.Redis]:
    """A web process, as far as the janitor sees one."""
    with redis.Redis.from_url(redis_url) as client, client.pubsub() as subscription:
        subscription.subscribe(DONE_CHANNEL)
        subscription.get_message(timeout=5)
        yield client


def fall_silent(database: Database) -> None:
    with database.write() as session:
        session.execute(update(ClientSession).values(last_seen_at=utc_now() - timedelta(minutes=6)))


def is_silent(database: Database, run: Run) -> bool:
    with database.read() as session:
        return session.get_one(ClientSession, run.session_id).silent_since is not None


def test_silent_sessions_are_noted_and_a_heartbeat_revives_them(database: Database, run: Run, redis_url: str) -> None:
    with web_that_listens(redis_url) as client:
        client.set(UP_SINCE_KEY, time.time() - 301)
        tidy()
        assert not is_silent(database, run)
        fall_silent(database)
        tidy()
        assert is_silent(database, run)
        heartbeat(database, run.owner_id, run.session_id)
        assert not is_silent(database, run)


def test_an_outage_of_ours_is_nobodys_silence(database: Database, run: Run, redis_url: str) -> None:
    fall_silent(database)
    tidy()  # no web process
    with web_that_listens(redis_url) as client:
        tidy()
        client.set(UP_SINCE_KEY, time.time() - 299)
        tidy()
        assert not is_silent(database, run)
        assert 0 < client.ttl(UP_SINCE_KEY) < 300  # type: ignore[operator]
        client.set(UP_SINCE_KEY, time.time() - 301)
    tidy()  # web has gone, so what was before does not count any more
    with web_that_listens(redis_url):
        tidy()
    assert not is_silent(database, run)


def test_sessions_that_stay_silent_end(database: Database, run: Run) -> None:
    young = new_run(database)
    with database.write() as session:
        for each, days in ((run, 8), (young, 6)):
            session.get_one(ClientSession, each.session_id).silent_since = utc_now() - timedelta(days=days)
    tidy()
    with database.read() as session:
        found = {row.id: row.finish_reason for row in session.scalars(select(ClientSession))}
    assert found == {run.session_id: "interrupted", young.session_id: None}
    with pytest.raises(Gone):
        heartbeat(database, run.owner_id, run.session_id)
    heartbeat(database, young.owner_id, young.session_id)


def test_workers_that_died_long_ago_go(database: Database) -> None:
    with database.write() as session:
        alive, dead = add_worker(session), add_worker(session)
        session.execute(update(Worker).where(Worker.id == dead).values(last_seen=database_clock() - 601))
    tidy()
    with database.read() as session:
        assert list(session.scalars(select(Worker.id))) == [alive]


def test_doorbells_of_workers_that_are_gone_go(database: Database, redis_url: str) -> None:
    """Whenever the worker went, and whoever rang at it since; what an older Celery noted of its queue goes as well."""
    with database.write() as session:
        alive, gone = add_worker(session), "worker-gone"
    notes = [f"_kombu.binding{kind}.{wake_queue(gone)}" for kind in ("", "_permanent")]
    others = [wake_queue(alive), "train.tiny", "sample.wake.up", f"_kombu.binding.{wake_queue(alive)}"]
    with redis.Redis.from_url(redis_url) as server:
        for name in (wake_queue(gone), *notes, *others):
            server.lpush(name, "a doorbell")
        collect()
        assert {name.decode() for name in server.scan_iter()} == set(others)


def test_blobs_are_collected_while_redis_is_away(database: Database, configure: Callable[..., None]) -> None:
    configure(REDIS_URL=f"redis://127.0.0.1:{free_port()}/0", TINWORKS_ORPHAN_GRACE_S=0)
    get_blob_store().put("results/orphan", b"result")
    collect()
    assert not get_blob_store().list("results")


@pytest.mark.parametrize("end", ["silent for long", "silent for a moment", "finished", None])
def test_samples_of_sessions_that_have_ended_go(database: Database, run: Run, redis_url: str, end: str | None) -> None:
    """A client that was silent for a moment only may have been kept away by an outage of ours."""
    values: dict[str, object] = {
        "silent for long": {"silent_since": utc_now() - timedelta(seconds=31)},
        "silent for a moment": {"silent_since": utc_now() - timedelta(seconds=1)},
        "finished": {"finished_at": utc_now()},
        None: {"silent_since": None},
    }[end]  # type: ignore[assignment]
    with database.write() as session:
        add_model(session)
        session.execute(update(ClientSession).values(**values))
    own, direct = f"{run.session_id}:sample:0:7", "direct:sample:0a"
    submit(redis_url, POOL, own, direct)
    tidy()
    with redis.Redis.from_url(redis_url) as server:
        left = {raw.decode() for raw in server.zrange(unfinished_key(POOL), 0, -1)}  # type: ignore[union-attr]
        assert left == ({direct} if end in ("silent for long", "finished") else {own, direct})
        assert bool(server.exists(request_key(own))) == (own in left)


def submit(redis_url: str, pool: str, *request_ids: str) -> None:
    async def store() -> None:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            for request_id in request_ids:
                await SampleInbox(client, depths=Depths(9, 9)).submit(request_id, pool, b"body", owner_id="o")

    asyncio.run(store())


def test_tidying_goes_on_while_redis_is_away(database: Database, run: Run, configure: Callable[..., None]) -> None:
    with database.write() as session:
        add_checkpoint(session, run, "old", expires_at=utc_now() - timedelta(seconds=1))
    configure(REDIS_URL=f"redis://127.0.0.1:{free_port()}/0")
    tidy()
    with get_database().read() as session:
        assert not session.scalars(select(Checkpoint.name)).all()


def test_gaps_are_filled(database: Database, run: Run) -> None:
    with database.write() as session:
        add_operation(session, run.id, 2)
        session.execute(update(Operation).values(created_at=utc_now() - timedelta(minutes=21)))
    tidy()
    with database.read() as session:
        made = log.find(session, run.id, 1)
    assert made is not None
    assert made.state == FAILED


def test_old_results_go_with_their_blobs(database: Database, run: Run) -> None:
    blobs = get_blob_store()
    for name in ("old", "young"):
        blobs.put(f"results/{name}", b"result")
    other, long_ago = new_run(database), utc_now() - timedelta(hours=25)
    with database.write() as session:
        for each, name in ((run, "old"), (other, "young")):
            add_operation(session, each.id, 1)
            log.finish(session, [Finished(each.id, 1, Payload(None, f"results/{name}", 6), "proto")])
        session.execute(update(Run).where(Run.id == run.id).values(last_request_at=long_ago))
        session.execute(update(Operation).where(Operation.model_id == run.id).values(finished_at=long_ago))
    tidy()
    assert blobs.list("results") == ["results/young"]


def test_two_rounds_are_as_good_as_one(database: Database, run: Run) -> None:
    with database.write() as session:
        add_operation(session, run.id, 2)
        session.execute(update(Operation).values(created_at=utc_now() - timedelta(minutes=21)))
    tidy()
    tidy()
    with database.read() as session:
        assert list(session.scalars(select(Operation.seq_id).order_by(Operation.seq_id))) == [1, 2]


def test_rounds_at_once_are_as_good_as_one(database: Database, run: Run) -> None:
    """Whoever is first does it, or each does a part: nothing is left, done twice, or an error."""
    blobs, results, at_once = get_blob_store(), 20, 3
    ended, behind = new_run(database), new_run(database)
    with database.write() as session:
        for seq_id in range(1, results + 1):
            blobs.put(f"results/{seq_id}", b"result")
            add_operation(session, run.id, seq_id)
            log.finish(session, [Finished(run.id, seq_id, Payload(None, f"results/{seq_id}", 6), "proto")])
        long_ago = utc_now() - timedelta(hours=25)
        session.execute(update(Operation).values(finished_at=long_ago))
        session.get_one(Run, run.id).applied_seq = results
        session.get_one(Run, run.id).last_request_at = long_ago
        add_operation(session, behind.id, 2)
        waiting = update(Operation).where(Operation.model_id == behind.id)
        session.execute(waiting.values(created_at=utc_now() - timedelta(minutes=21)))
        add_checkpoint(session, run, "old", expires_at=utc_now() - timedelta(seconds=1))
        dead = add_worker(session)
        session.execute(update(Worker).where(Worker.id == dead).values(last_seen=database_clock() - 601))
        session.get_one(ClientSession, ended.session_id).finished_at = utc_now() - timedelta(hours=1)
    together = threading.Barrier(at_once)

    def tidy_together() -> None:
        together.wait()
        tidy()

    with ThreadPoolExecutor(at_once) as pool:
        for round_ in [pool.submit(tidy_together) for _ in range(at_once)]:
            round_.result()
    assert not blobs.list("results")
    with database.read() as session:
        assert [row.seq_id for row in session.scalars(select(Operation).where(Operation.kind == log.MISSING))] == [1]
        assert not session.scalars(select(Checkpoint.name)).all()
        assert not session.scalars(select(Worker.id)).all()
        assert session.get_one(Run, ended.id).closed_at is not None
        assert session.get_one(Run, run.id).closed_at is None


def test_uploaded_losses_go_with_their_sessions(database: Database, run: Run) -> None:
    old, young = new_run(database), new_run(database)
    with database.write() as session:
        for each in (run, old, young):
            keys = {"owner_id": each.owner_id, "session_id": each.session_id}
            session.add(CustomLoss(id=each.id[-64:], seq_id=0, fingerprint="f", graph="{}", **keys))
        session.get_one(ClientSession, old.session_id).finished_at = utc_now() - timedelta(days=8)
        session.get_one(ClientSession, young.session_id).finished_at = utc_now() - timedelta(days=6)
    tidy()
    with database.read() as session:
        assert set(session.scalars(select(CustomLoss.session_id))) == {run.session_id, young.session_id}
