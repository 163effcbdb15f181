"""What a session's end leaves of its runs: `weights/auto-last` for a while, and nothing that only recovery needed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from sqlalchemy import func, select, update

from app.checkpoints import service as checkpoints
from app.checkpoints.models import Checkpoint, Snapshot
from app.db import utc_now
from app.runs import log
from app.runs.models import Operation, Run
from app.sessions import endings
from app.sessions.endings import AUTO_LAST, Closing
from app.sessions.models import ClientSession
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, residents, slot_of, state_of
from workers.collector import Collector
from workers.train.loop import TrainLoop

HOW = Closing(patience=timedelta(minutes=20), ttl_s=3600)


def finish(lab: Lab, client: Client, *, ago: timedelta = timedelta()) -> None:
    with lab.database.write() as session:
        session.get_one(ClientSession, client.row.session_id).finished_at = utc_now() - ago


def age(lab: Lab, accepted: timedelta, *, finished: timedelta | None = None) -> None:
    """All operations were accepted so long ago, and those that are over finished so long ago."""
    with lab.database.write() as session:
        session.execute(update(Operation).values(created_at=utc_now() - accepted))
        over = update(Operation).where(Operation.finished_at.is_not(None))
        session.execute(over.values(finished_at=utc_now() - (finished or accepted)))


def close(lab: Lab, how: Closing = HOW) -> int:
    """One round of a janitor; returns how many runs were closed."""
    with lab.database.read() as session:
        model_ids = endings.runs_to_close(session)
    closed = 0
    for model_id in model_ids:
        with lab.database.write() as session:
            dead = endings.close_run(session, model_id, how)
        for key in dead or ():
            lab.blobs.delete(key)
        closed += dead is not None
    return closed


def trained(lab: Lab, loop: TrainLoop, *, steps: int = 2) -> Client:
    client = lab.client()
    for step in range(steps):
        client.train(step)
    lab.work(loop)
    return client


def paths(lab: Lab, client: Client) -> list[str]:
    with lab.database.read() as session:
        return sorted(session.scalars(select(Checkpoint.name).where(Checkpoint.model_id == client.model_id)))


def bodies(lab: Lab, client: Client) -> int:
    named = (Operation.body.is_not(None), Operation.body_blob.is_not(None))
    with lab.database.read() as session:
        counts = [
            session.scalar(select(func.count()).where(Operation.model_id == client.model_id, there)) for there in named
        ]
    return sum(count or 0 for count in counts)


def assert_loads_as(lab: Lab, loop: TrainLoop, client: Client) -> None:
    """A new run from the checkpoint goes on as the old one would have."""
    path = checkpoints.tinker_path(client.model_id, "weights", AUTO_LAST)
    again = lab.client_from(path, owner_id=client.owner_id, optimizer=True)
    again.rank, again.seed, again.script = client.rank, client.seed, list(client.script)
    again.train(77)
    lab.work(loop)
    assert_close(state_of(loop, again), again.alone)


def test_the_last_state_becomes_a_checkpoint_for_a_time(each_lab: Lab) -> None:
    lab = each_lab
    loop = lab.worker()
    client = trained(lab, loop)
    client.forward_backward(9)  # a gradient that no step has taken yet
    lab.work(loop)
    finish(lab, client)
    assert close(lab) == 0  # the worker has it still
    loop._residents.evict_abandoned()
    assert residents(loop) == set()
    assert close(lab) == 1
    with lab.database.read() as session:
        (row,) = session.scalars(select(Checkpoint))
    assert (row.kind, row.name, row.owner_id) == ("weights", AUTO_LAST, client.owner_id)
    assert row.expires_at is not None and abs(row.expires_at - utc_now() - timedelta(hours=1)) < timedelta(minutes=1)
    client.script.append(("step", 0))
    path = checkpoints.tinker_path(client.model_id, "weights", AUTO_LAST)
    again = lab.client_from(path, owner_id=client.owner_id, optimizer=True)
    again.optim_step(note=False)
    lab.work(loop)
    assert_close(state_of(loop, again), client.alone)


def test_a_state_that_died_with_its_worker_is_computed_again(each_lab: Lab) -> None:
    lab = each_lab
    client = trained(lab, first := lab.worker())
    lab.kill(first)
    finish(lab, client)
    assert close(lab) == 0 and close(lab) == 0
    second = lab.worker()
    lab.work(second)
    second._residents.evict_abandoned()
    assert close(lab) == 1
    assert_loads_as(lab, second, client)


def test_snapshots_for_recovery_and_bodies_go(lab: Lab) -> None:
    lab.settings.inline_bytes = 64
    loop = lab.worker(snapshot_operations=2)
    client = trained(lab, loop)
    loop._residents.evict_all()
    client.forward_backward(5)
    lab.work(loop)
    loop._residents.evict_all()
    snapshot_id = client.row.recovery_snapshot_id
    finish(lab, client)
    assert close(lab, Closing(patience=HOW.patience, ttl_s=0)) == 1
    assert client.row.recovery_snapshot_id is None and client.row.closed_at is not None
    assert bodies(lab, client) == 0 and lab.blobs.list("bodies") == []
    collector = Collector(lab.database, lab.blobs, lab.settings.model_copy(update={"orphan_grace_s": 0.0}))
    for _ in range(2):
        collector.round()
    assert snapshot_id is not None and lab.blobs.list(checkpoints.snapshot_folder(snapshot_id)) == []
    with lab.database.read() as session:
        assert session.scalars(select(Snapshot.id)).all() == []
    assert close(lab) == 0


def test_the_last_state_outlives_the_snapshots_for_recovery(lab: Lab) -> None:
    client = trained(lab, loop := lab.worker())
    loop._residents.evict_all()
    finish(lab, client)
    assert close(lab) == 1
    collector = Collector(lab.database, lab.blobs, lab.settings.model_copy(update={"orphan_grace_s": 0.0}))
    for _ in range(2):
        collector.round()
    assert_loads_as(lab, loop, client)


def test_a_state_that_its_client_has_saved_is_not_stored_again(lab: Lab) -> None:
    client = trained(lab, loop := lab.worker())
    client.save("final")
    lab.work(loop)
    lab.kill(loop)
    finish(lab, client)
    assert close(lab) == 1
    assert paths(lab, client) == [AUTO_LAST, "final"]
    assert lab.snapshot_of(client, "weights", AUTO_LAST) == lab.snapshot_of(client, "weights", "final")


def test_a_run_that_was_never_trained_leaves_nothing(lab: Lab) -> None:
    client, loop = lab.client(), lab.worker()
    lab.work(loop)
    loop._residents.evict_all()
    finish(lab, client)
    assert close(lab) == 1
    assert paths(lab, client) == []


def test_a_checkpoint_of_that_name_stays_what_it_is(lab: Lab) -> None:
    client = trained(lab, loop := lab.worker())
    client.save(AUTO_LAST)
    client.train(9)
    lab.work(loop)
    loop._residents.evict_all()
    before = lab.snapshot_of(client, "weights", AUTO_LAST)
    finish(lab, client)
    assert close(lab) == 1
    assert lab.snapshot_of(client, "weights", AUTO_LAST) == before


def test_what_was_accepted_before_the_end_still_finishes(lab: Lab) -> None:
    client = trained(lab, loop := lab.worker())
    _, step = client.train(9)
    finish(lab, client)
    assert close(lab) == 0
    lab.work(loop)
    assert client.operation(step).state == log.DONE
    loop._residents.evict_abandoned()
    assert close(lab) == 1
    assert_loads_as(lab, loop, client)


def test_what_nobody_did_long_after_the_end_fails_and_what_was_done_is_kept(each_lab: Lab) -> None:
    lab = each_lab
    client = trained(lab, loop := lab.worker())
    loop._residents.evict_all()
    _, step = client.train(9)
    finish(lab, client, ago=timedelta(minutes=21))
    assert close(lab) == 0  # it was accepted a moment ago
    age(lab, timedelta(minutes=21), finished=timedelta(minutes=19))
    assert close(lab) == 0  # the one before it was done not long ago: whoever serves the model may be on its way
    age(lab, timedelta(minutes=21))
    assert close(lab) == 1
    assert client.error(step) == ("user", "session_id: the session ended before this was done")
    client.script = client.script[:-2]
    assert_loads_as(lab, loop, client)


def test_a_worker_that_is_in_the_middle_of_it_commits_nothing_then(lab: Lab) -> None:
    client = trained(lab, loop := lab.worker())
    _, step = client.train(9)
    stale = slot_of(loop, client)
    finish(lab, client, ago=timedelta(hours=1))
    age(lab, timedelta(hours=1))
    close(lab)
    assert client.row.epoch > stale.epoch and client.row.worker_id is None
    lab.work(loop)
    loop._residents.evict_abandoned()
    assert client.operation(step).state == log.FAILED


def test_if_nobody_computes_the_last_state_an_older_one_is_kept(lab: Lab) -> None:
    client = trained(lab, loop := lab.worker(snapshot_operations=5))
    lab.write_snapshots(loop)
    client.forward_backward(9)
    lab.work(loop)
    lab.kill(loop)
    finish(lab, client, ago=timedelta(hours=1))
    assert close(lab) == 0
    age(lab, timedelta(hours=1))
    assert close(lab) == 1
    assert paths(lab, client) == [AUTO_LAST]
    assert_loads_as(lab, lab.worker(), client_without_last(client))


def client_without_last(client: Client) -> Client:
    client.script = client.script[:-1]
    return client


@pytest.mark.parametrize("resident", [True, False])
def test_two_janitors_at_once_do_what_one_does(each_lab: Lab, resident: bool) -> None:
    lab = each_lab
    loop = lab.worker()
    clients = [trained(lab, loop, steps=1) for _ in range(6)]
    if resident:
        lab.kill(loop)
    else:
        loop._residents.evict_all()
    for client in clients:
        finish(lab, client)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            list(threads.map(lambda _: close(lab), range(2)))
    second = lab.worker()
    lab.work(second)
    second._residents.evict_abandoned()
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            list(threads.map(lambda _: close(lab), range(2)))
    with lab.database.read() as session:
        assert session.scalars(select(Run.id).where(Run.closed_at.is_(None))).all() == []
    for client in clients:
        assert paths(lab, client) == [AUTO_LAST]
        saves = [seq for seq in range(client.next_seq, client.next_seq + 3) if _has(lab, client, seq)]
        assert len(saves) == int(resident)


def _has(lab: Lab, client: Client, seq_id: int) -> bool:
    with lab.database.read() as session:
        return log.find(session, client.model_id, seq_id) is not None
