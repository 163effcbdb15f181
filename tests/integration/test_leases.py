"""Leases on both databases: one holder at a time, by the database's clock, and nothing from one that was overtaken."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import select, text, update
from sqlalchemy.orm import Session

from app.db import Database, database_clock, utc_now
from app.runs.models import Run
from app.sessions.models import ClientSession
from tests.factories import new_run
from tests.services import wait_for
from tests.unit.workers.train.train_lab import Lab, assert_close, residents, state_of
from workers.train import lease
from workers.train.lease import Lease

LEASE_S = 3600.0


@pytest.fixture
def run(database: Database) -> Run:
    return new_run(database)


def take(database: Database, run: Run, worker_id: str = "w1") -> Lease | None:
    with database.write() as session:
        taken = lease.take(session, worker_id=worker_id, lease_s=LEASE_S, model_ids=[run.id])
    return taken[0] if taken else None


def held(database: Database, run: Run, worker_id: str = "w1") -> Lease:
    found = take(database, run, worker_id)
    assert found is not None
    return found


def expire(database: Database, run: Run) -> None:
    """What time does to a lease that is not renewed."""
    with database.write() as session:
        session.execute(update(Run).where(Run.id == run.id).values(lease_expires_at=database_clock() - 0.001))


def advance(database: Database, run: Run, granted: Lease, to: int, worker_id: str = "w1") -> bool:
    with database.write() as session:
        return lease.advance(session, worker_id=worker_id, model_id=run.id, epoch=granted.epoch, applied_seq=to)


def now(database: Database, run: Run) -> Run:
    with database.read() as session:
        return session.get_one(Run, run.id)


def test_the_databases_clock_tells_the_time(database: Database) -> None:
    with database.read() as session:
        assert abs((session.scalar(select(database_clock())) or 0) - time.time()) < 5


def test_a_run_that_nobody_holds_is_taken_under_a_new_epoch(database: Database, run: Run) -> None:
    granted = held(database, run)
    assert (granted.run.id, granted.epoch, granted.crashes) == (run.id, run.epoch + 1, 0)
    assert now(database, run).worker_id == "w1"


def test_a_run_that_is_held_is_not_taken(database: Database, run: Run) -> None:
    held(database, run)
    assert take(database, run, "w2") is None
    with database.read() as session:
        assert lease.free_runs(session, [run.id], worker_id="w2") == set()
        assert lease.free_runs(session, [run.id], worker_id="w1") == {run.id}


def test_the_same_worker_may_take_its_run_again(database: Database, run: Run) -> None:
    first, again = held(database, run), held(database, run)
    assert again.epoch == first.epoch + 1
    assert again.crashes == 0
    assert not advance(database, run, first, 1)


def test_an_expired_lease_is_taken_over(database: Database, run: Run) -> None:
    first = held(database, run)
    expire(database, run)
    second = held(database, run, "w2")
    assert second.epoch == first.epoch + 1


def test_an_expired_lease_that_nobody_took_is_renewed_under_its_epoch(database: Database, run: Run) -> None:
    granted = held(database, run)
    expire(database, run)
    with database.write() as session:
        assert lease.renew(session, worker_id="w1", lease_s=LEASE_S) == 1
    assert take(database, run, "w2") is None
    assert advance(database, run, granted, 1)


def test_renewing_touches_no_lease_of_another_worker(database: Database, run: Run) -> None:
    held(database, run)
    expire(database, run)
    with database.write() as session:
        assert lease.renew(session, worker_id="w2", lease_s=LEASE_S) == 0
    held(database, run, "w2")


def test_a_renewed_lease_lasts_as_long_as_a_new_one(database: Database, run: Run) -> None:
    held(database, run)
    with database.write() as session:
        lease.renew(session, worker_id="w1", lease_s=LEASE_S)
        left = session.scalar(select(Run.lease_expires_at - database_clock()).where(Run.id == run.id))
    assert left == pytest.approx(LEASE_S, abs=5)


def test_a_run_that_was_given_back_is_free_at_once(database: Database, run: Run) -> None:
    granted = held(database, run)
    with database.write() as session:
        assert lease.release(session, worker_id="w1", model_id=run.id, epoch=granted.epoch)
    assert held(database, run, "w2").crashes == 0


def test_a_worker_that_was_overtaken_commits_nothing(database: Database, run: Run) -> None:
    stale = held(database, run)
    expire(database, run)
    held(database, run, "w2")
    fence = {"worker_id": "w1", "model_id": run.id, "epoch": stale.epoch}
    with database.write() as session:
        assert not lease.advance(session, **fence, applied_seq=9)
        assert not lease.set_recovery_snapshot(session, **fence, snapshot_id="stale")
        assert not lease.release(session, **fence)
    after = now(database, run)
    assert (after.applied_seq, after.recovery_snapshot_id, after.worker_id) == (0, None, "w2")


def test_an_advance_moves_position_and_values_together(database: Database, run: Run) -> None:
    granted = held(database, run)
    fence = {"worker_id": "w1", "model_id": run.id, "epoch": granted.epoch}
    with database.write() as session:
        assert lease.advance(session, **fence, applied_seq=3, sampler_snapshot_id="s1")
        assert lease.set_recovery_snapshot(session, **fence, snapshot_id="r1")
    after = now(database, run)
    assert (after.applied_seq, after.sampler_snapshot_id, after.recovery_snapshot_id) == (3, "s1", "r1")


def die(database: Database, run: Run, worker_id: str) -> int:
    """A worker takes the run and dies; returns the crashes that it was told of."""
    granted = held(database, run, worker_id)
    expire(database, run)
    return granted.crashes


def test_deaths_at_one_operation_are_counted(database: Database, run: Run) -> None:
    assert [die(database, run, f"w{i}") for i in range(4)] == [0, 1, 2, 3]


def test_deaths_are_counted_anew_at_the_next_operation(database: Database, run: Run) -> None:
    die(database, run, "w1")
    die(database, run, "w2")
    third = held(database, run, "w3")
    assert third.crashes == 2
    assert advance(database, run, third, 1, "w3")
    expire(database, run)
    assert die(database, run, "w4") == 1


def test_giving_back_and_taking_again_forgets_no_death_at_the_same_operation(database: Database, run: Run) -> None:
    die(database, run, "w1")
    second = held(database, run, "w2")
    assert second.crashes == 1
    with database.write() as session:
        lease.release(session, worker_id="w2", model_id=run.id, epoch=second.epoch)
    assert held(database, run, "w3").crashes == 1


def test_of_workers_that_race_for_a_run_one_gets_it(database: Database, run: Run) -> None:
    workers = [f"w{i}" for i in range(6)]
    barrier = threading.Barrier(len(workers))

    def race(worker_id: str) -> Lease | None:
        with database.read() as session:
            session.execute(text("SELECT 1"))  # every thread has its connection when the race begins
            barrier.wait()
        return take(database, run, worker_id)

    with ThreadPoolExecutor(len(workers)) as pool:
        for _ in range(3):
            granted = [one for one in pool.map(race, workers) if one]
            assert len(granted) == 1
            expire(database, run)


def test_runs_of_clients_that_are_gone_are_abandoned(database: Database) -> None:
    runs = {name: new_run(database) for name in ("live", "finished", "silent", "elsewhere")}
    for name, run in runs.items():
        held(database, run, "w2" if name == "elsewhere" else "w1")
    with database.write() as session:
        session.get_one(ClientSession, runs["finished"].session_id).finished_at = utc_now()
        for name in ("silent", "elsewhere"):
            session.get_one(ClientSession, runs[name].session_id).silent_since = utc_now()
    with database.read() as session:
        found = lease.abandoned_runs(session, worker_id="w1")
    assert found == {runs["finished"].id, runs["silent"].id}


def test_a_renewal_and_a_commit_never_wait_for_each_other(postgres_url: str) -> None:
    """Both lock several of a worker's runs, in whatever order they lie in the table."""
    database = Database(postgres_url)
    last, first = sorted((new_run(database) for _ in range(2)), key=lambda run: run.id, reverse=True)
    granted = {run.id: held(database, run) for run in (last, first)}  # now the last by its id lies first
    waits = text(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )

    def renew() -> int:
        with database.write() as session:
            return lease.renew(session, worker_id="w1", lease_s=LEASE_S)

    def moved(session: Session, run: Run) -> bool:
        epoch = granted[run.id].epoch
        return lease.advance(session, worker_id="w1", model_id=run.id, epoch=epoch, applied_seq=1)

    def waiting() -> object:
        with database.read() as session:
            return session.scalar(waits)

    with ThreadPoolExecutor(1) as pool:
        with database.write() as session:
            assert moved(session, first)
            renewing = pool.submit(renew)
            wait_for(waiting)
            assert moved(session, last)
        assert renewing.result(30) == 2
    database.dispose()


@pytest.mark.parametrize("how", ["in turn", "draining"])
def test_runs_that_were_dropped_while_the_database_was_away_are_given_back(lab: Lab, how: str) -> None:
    loop, dropped, kept = lab.worker(), lab.client(), lab.client(seed=2)
    for client in (dropped, kept):
        client.train(1)
    lab.work(loop)
    loop._residents.drop(dropped.model_id)
    assert dropped.row.worker_id == kept.row.worker_id == loop._worker_id
    if how == "draining":
        loop.hand_over()
        assert kept.row.worker_id is None
    else:
        loop._residents.tidy()
        assert kept.row.worker_id == loop._worker_id and residents(loop) == {kept.model_id}
    assert dropped.row.worker_id is None and dropped.row.crash_count == 0
    dropped.train(2)
    lab.work(loop)
    assert_close(state_of(loop, dropped), dropped.alone)
