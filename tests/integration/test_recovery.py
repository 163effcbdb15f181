"""Runs that lose their worker, or their slot: rebuilt from snapshot and log, they are what they would have been."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
from sqlalchemy import select, update

from app.checkpoints import service as checkpoints
from app.checkpoints.models import Snapshot
from app.checkpoints.service import snapshot_folder
from app.db import utc_now
from app.runs import log
from app.runs.log import ACCEPTED, DONE
from app.runs.models import Operation, Run
from app.sessions.models import ClientSession
from tests.services import wait_for
from tests.unit.workers.train.train_lab import (
    Client,
    Lab,
    State,
    assert_close,
    random_data,
    residents,
    slot_of,
    state_of,
)
from workers.train import recovery
from workers.train.loop import TrainLoop

OFTEN, NEVER = {"snapshot_operations": 2}, {"snapshot_operations": 10_000}


Act = Callable[[Client], object]


def perform(lab: Lab, loop: TrainLoop, client: Client, acts: list[Act]) -> None:
    """One request at a time, so that passes have the same shapes however the run is disturbed."""
    for act in acts:
        act(client)
        lab.work(loop)
        lab.write_snapshots(loop)


def forward_backward(data_seed: int) -> Act:
    return lambda client: client.forward_backward(data_seed)


def optim_step(client: Client) -> object:
    return client.optim_step()


def bad_forward_backward(client: Client) -> object:
    return client.bad_forward_backward()


def refused_step(client: Client) -> object:
    return client.optim_step(note=False, learning_rate=-1.0)


def nan_step(client: Client) -> object:
    return client.nan_forward_backward(), client.optim_step(note=False)


def steps(count: int, first: int = 0) -> list[Act]:
    return [act for i in range(count) for act in (forward_backward(first + i), optim_step)]


def undisturbed(lab: Lab, acts: list[Act]) -> State:
    loop, client = lab.worker(**NEVER), lab.client()
    perform(lab, loop, client, acts)
    state = state_of(loop, client)
    lab.kill(loop)
    return state


def blobs_of(lab: Lab, snapshot_id: str) -> list[str]:
    return lab.blobs.list(snapshot_folder(snapshot_id))


# -- killed workers

BEFORE = [*steps(3), bad_forward_backward, forward_backward(7), forward_backward(8)]
AFTER = [optim_step, *steps(2, 20)]


@pytest.mark.parametrize("snapshots", [OFTEN, NEVER], ids=["with snapshots", "log only"])
def test_a_killed_workers_run_goes_on_bit_for_bit(each_lab: Lab, snapshots: dict[str, int]) -> None:
    lab = each_lab
    expected = undisturbed(lab, BEFORE + AFTER)
    first, client = lab.worker(**snapshots), lab.client()
    perform(lab, first, client, BEFORE)
    at_death = state_of(first, client)
    assert at_death.counters == (2, (7,), 28)
    finished = [client.operation(seq).finished_at for seq in range(client.next_seq)]
    lab.kill(first)
    second = lab.worker(**snapshots)
    step = client.optim_step()
    lab.work(second)
    assert (client.row.recovery_snapshot_id is None) == (snapshots is NEVER)
    assert client.metrics(step)["failed_operations"] == 1
    assert client.metrics(step)["tokens"] == 28
    assert [client.operation(seq).finished_at for seq in range(step)] == finished
    perform(lab, second, client, AFTER[1:])
    assert state_of(second, client).same_bits(expected)
    assert_close(expected, client.alone)


@pytest.mark.parametrize("snapshots", [OFTEN, NEVER], ids=["with snapshots", "log only"])
@pytest.mark.parametrize("position", range(1, 12, 2))
def test_it_does_not_matter_where_the_worker_dies(lab: Lab, position: int, snapshots: dict[str, int]) -> None:
    acts = [forward_backward(1), refused_step, optim_step, bad_forward_backward, optim_step_that_fails, nan_step]
    acts += [forward_backward(2), bad_forward_backward, refused_step, forward_backward(3), optim_step, optim_step]
    expected = undisturbed(lab, acts)
    first, client = lab.worker(**snapshots), lab.client()
    perform(lab, first, client, acts[:position])
    before = state_of(first, client)
    lab.kill(first)
    second = lab.worker(**snapshots)
    lab.restore(second, client)
    assert state_of(second, client).same_bits(before)
    perform(lab, second, client, acts[position:])
    assert state_of(second, client).same_bits(expected)


def optim_step_that_fails(client: Client) -> object:
    return client.optim_step(note=False)


def test_a_worker_that_dies_with_requests_waiting_leaves_them_to_the_next(lab: Lab) -> None:
    first, client = lab.worker(), lab.client()
    client.train(1)
    lab.work(first)
    _, step = client.train(2)
    lab.kill(first)
    second = lab.worker()
    lab.work(second)
    assert client.operation(step).state == DONE
    assert_close(state_of(second, client), client.alone)


def test_a_short_lease_runs_out_by_the_databases_clock(each_lab: Lab) -> None:
    lab = each_lab
    first, second, client = lab.worker(lease_s=0.001), lab.worker(), lab.client()
    client.train(1)
    lab.work(first)
    client.train(2)
    wait_for(lambda: second.cycle())
    lab.work(second)
    assert client.row.worker_id == second._worker_id
    assert_close(state_of(second, client), client.alone)


def test_a_live_lease_keeps_others_away(lab: Lab) -> None:
    first, second, client = lab.worker(), lab.worker(), lab.client()
    lab.work(first)
    client.train(1)
    assert not second.cycle()
    lab.work(first)
    assert_close(state_of(first, client), client.alone)


def test_a_restore_that_cannot_repeat_an_operation_is_given_up_not_guessed(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, client = lab.worker(**NEVER), lab.client()
    client.train(1)
    lab.work(first)
    _, step = client.train(2)
    lab.kill(first)
    second = lab.worker(**NEVER)
    real, calls = recovery.Executor._work, []

    def out_of_memory(*args: object) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise MemoryError
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery.Executor, "_work", out_of_memory)
    second.cycle()
    assert client.operation(step).state == ACCEPTED
    assert residents(second) == set()
    lab.work(second)
    assert_close(state_of(second, client), client.alone)


def test_a_run_that_cannot_be_restored_holds_up_no_other(lab: Lab) -> None:
    first, broken, healthy = lab.worker(**OFTEN), lab.client(rank=2), lab.client(rank=3)
    broken.train(1)
    healthy.train(1)
    lab.work(first)
    lab.write_snapshots(first)
    lab.kill(first)
    snapshot_id = broken.row.recovery_snapshot_id
    assert snapshot_id is not None
    lab.blobs.delete(snapshot_folder(snapshot_id))
    broken.train(2)
    healthy.train(2)
    second = lab.worker(**OFTEN)
    for _ in range(2):  # the loop sleeps after a turn in which it could do nothing
        lab.work(second)
    assert residents(second) == {healthy.model_id}
    assert broken.row.worker_id is None
    assert_close(state_of(second, healthy), healthy.alone)


# -- snapshots


def bodies(lab: Lab, client: Client) -> list[int]:
    """Sequence ids whose bodies are still there."""
    query = select(Operation.seq_id, Operation.body, Operation.body_blob).where(
        Operation.model_id == client.model_id, Operation.body_bytes > 0
    )
    with lab.database.read() as session:
        return sorted(row.seq_id for row in session.execute(query) if row.body is not None or row.body_blob is not None)


def test_bodies_before_a_snapshot_are_forgotten_with_their_blobs(each_lab: Lab) -> None:
    lab = each_lab
    lab.settings.inline_bytes = 64
    loop, client = lab.worker(snapshot_operations=4), lab.client()
    perform(lab, loop, client, steps(3))
    snapshot_id = client.row.recovery_snapshot_id
    assert snapshot_id is not None
    with lab.database.read() as session:
        covered = session.get_one(Snapshot, snapshot_id).seq_id
    assert bodies(lab, client) == list(range(covered + 1, client.next_seq))
    assert 0 < covered < client.next_seq - 1
    with lab.database.read() as session:
        kept = set(session.scalars(select(Operation.body_blob).where(Operation.body_blob.is_not(None))))
    assert set(lab.blobs.list("bodies")) == kept
    lab.kill(loop)
    second = lab.worker()
    client.train(9)
    lab.work(second)
    assert_close(state_of(second, client), client.alone)


def test_an_old_recovery_snapshot_is_deleted_once_the_next_is_there(lab: Lab) -> None:
    loop, client = lab.worker(**OFTEN), lab.client()
    seen = []
    for i in range(3):
        perform(lab, loop, client, steps(1, i))
        seen.append(client.row.recovery_snapshot_id)
    assert None not in seen and len(set(seen)) == 3
    assert [bool(blobs_of(lab, str(snapshot_id))) for snapshot_id in seen] == [False, False, True]
    with lab.database.read() as session:
        assert session.scalars(select(Snapshot.id)).all() == [seen[-1]]


def test_a_recovery_snapshot_that_a_checkpoint_names_is_kept(lab: Lab) -> None:
    loop, client = lab.worker(**OFTEN), lab.client()
    perform(lab, loop, client, steps(1))
    named = client.row.recovery_snapshot_id
    assert named is not None
    with lab.database.write() as session:
        checkpoints.name_snapshot(
            session,
            owner_id=client.owner_id,
            model_id=client.model_id,
            kind=checkpoints.TRAINING,
            name="auto",
            snapshot_id=named,
            ttl_seconds=None,
            user_metadata=None,
        )
    perform(lab, loop, client, steps(2, 5))
    assert client.row.recovery_snapshot_id != named
    assert blobs_of(lab, named)
    assert lab.snapshot_of(client, "weights", "auto") == named


def test_checkpoints_outlive_all_recovery_snapshots(lab: Lab) -> None:
    loop, client = lab.worker(**OFTEN), lab.client()
    perform(lab, loop, client, [*steps(1), lambda c: c.save("kept"), lambda c: c.save_for_sampler(path="kept")])
    perform(lab, loop, client, steps(4, 5))
    for kind in ("weights", "sampler_weights"):
        assert blobs_of(lab, lab.snapshot_of(client, kind, "kept"))


def test_a_snapshot_of_a_worker_that_was_overtaken_does_not_count(lab: Lab) -> None:
    first, second, client = lab.worker(**NEVER), lab.worker(**NEVER), lab.client()
    perform(lab, first, client, steps(1))
    stale = slot_of(first, client)
    lab.expire(first)
    perform(lab, second, client, steps(1, 5))
    first._writer.write_now(stale)
    assert client.row.recovery_snapshot_id is None
    assert lab.blobs.list("snapshots") == []
    assert bodies(lab, client) == list(range(client.next_seq))
    with lab.database.read() as session:
        assert session.scalars(select(Snapshot.id)).all() == []


def test_a_snapshot_that_cannot_be_written_costs_nothing_but_replay(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first, client = lab.worker(**OFTEN), lab.client()

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(recovery.snapshots, "write", full)
        perform(lab, first, client, steps(2))
    assert client.row.recovery_snapshot_id is None
    lab.kill(first)
    second = lab.worker()
    client.train(9)
    lab.work(second)
    assert_close(state_of(second, client), client.alone)


def test_a_snapshot_is_due_after_bytes_too(lab: Lab) -> None:
    loop, client = lab.worker(snapshot_bytes=1), lab.client()
    perform(lab, loop, client, steps(1))
    assert client.row.recovery_snapshot_id is not None


def test_a_snapshot_is_due_after_seconds_of_computing_too(lab: Lab) -> None:
    loop, client = lab.worker(snapshot_seconds=1e-9, snapshot_cost_factor=0, **NEVER), lab.client()
    perform(lab, loop, client, [*steps(1), forward_backward(5)])
    snapshot_id = client.row.recovery_snapshot_id
    assert snapshot_id is not None
    with lab.database.read() as session:
        assert session.get_one(Snapshot, snapshot_id).seq_id == client.next_seq - 1


def test_seconds_of_a_pass_are_shared_by_the_runs_in_it(lab: Lab) -> None:
    loop, small, large = lab.worker(**NEVER), lab.client(rank=1), lab.client(rank=2)
    lab.work(loop)
    before = [slot_of(loop, client).lag.seconds for client in (small, large)]
    small.send(random_data(1, [5]))
    large.send(random_data(2, [20, 20]))
    lab.work(loop)
    took = [slot_of(loop, client).lag.seconds - earlier for client, earlier in zip((small, large), before, strict=True)]
    assert took[1] / took[0] == pytest.approx(41 / 6)
    assert loop.snapshot_lag().seconds == pytest.approx(sum(before) + sum(took))


def test_a_run_that_costs_much_to_save_is_saved_less_often(lab: Lab) -> None:
    loop, cheap, dear = lab.worker(snapshot_seconds=1e-9, **NEVER), lab.client(rank=1), lab.client(rank=2)
    lab.work(loop)
    lab.write_snapshots(loop)
    before = [client.row.recovery_snapshot_id for client in (cheap, dear)]
    assert slot_of(loop, cheap).snapshot_cost_s > 0
    slot_of(loop, dear).snapshot_cost_s, slot_of(loop, cheap).snapshot_cost_s = 3600.0, 0.0
    for client in (cheap, dear):
        perform(lab, loop, client, steps(1))
    after = [client.row.recovery_snapshot_id for client in (cheap, dear)]
    assert after[0] != before[0] and after[1] == before[1]


def test_what_a_failed_snapshot_should_have_covered_is_still_to_be_repeated(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, client = lab.worker(snapshot_operations=3), lab.client()
    with monkeypatch.context() as patch:
        patch.setattr(recovery.snapshots, "write", Mock(side_effect=OSError("no space left on device")))
        perform(lab, loop, client, steps(1))
    assert slot_of(loop, client).lag.operations == 0
    assert loop.snapshot_lag().operations == 3
    perform(lab, loop, client, steps(2, 5))
    assert client.row.recovery_snapshot_id is not None
    assert loop.snapshot_lag().operations == slot_of(loop, client).lag.operations < 3


# -- slots


def test_many_runs_take_turns_in_few_slots(each_lab: Lab) -> None:
    lab = each_lab
    loop = lab.worker(train_slots=2)
    clients = [lab.client(rank=rank, seed=rank) for rank in range(1, 7)]
    for data in (1, 2, 3):
        for client in clients:
            client.train(10 * client.rank + data)
        lab.work(loop)
        assert len(residents(loop)) <= 2
    for client in clients:
        assert client.row.applied_seq == 6
        client.forward_backward(99)
        lab.work(loop)
        assert_close(state_of(loop, client), client.alone)


def test_runs_that_wait_for_a_slot_get_one_in_the_order_of_their_arrival(lab: Lab) -> None:
    """Else two runs whose clients answer at once would take the only slot in turns, for ever."""
    loop = lab.worker(train_slots=1)
    clients = sorted((lab.client(rank=rank) for rank in (1, 2, 3)), key=lambda client: client.model_id)
    lab.work(loop)
    clients[0].train(1)
    lab.work(loop)
    assert residents(loop) == {clients[0].model_id}
    for client in clients[1:]:
        client.train(1)
    for data in (2, 3):
        loop.cycle()
        for client in clients[:2]:
            if client.row.applied_seq == client.next_seq - 1 and client.model_id not in residents(loop):
                client.train(data)
    assert clients[2].row.applied_seq == 2


def test_the_least_recently_used_idle_run_makes_room(lab: Lab) -> None:
    loop = lab.worker(train_slots=2)
    old, recent, new = (lab.client(rank=rank) for rank in (1, 2, 3))
    for client in (old, recent):
        client.train(1)
        lab.work(loop)
    old.forward_backward(2)
    lab.work(loop)
    for client in (recent, old):
        client.train(3)
        lab.work(loop)
    for client in (recent, old):
        slot_of(loop, client).pause_s = None  # what their clients' pauses say is another matter
    new.train(1)
    lab.work(loop)
    assert residents(loop) == {old.model_id, new.model_id}
    assert recent.row.worker_id is None and recent.row.recovery_snapshot_id is not None


def test_an_evicted_run_comes_back_bit_for_bit_with_its_pending_gradient(lab: Lab) -> None:
    acts = [*steps(2), forward_backward(7), bad_forward_backward, forward_backward(8), optim_step]
    expected = undisturbed(lab, acts)
    loop, client = lab.worker(**NEVER), lab.client()
    for act in acts:
        perform(lab, loop, client, [act])
        if client.model_id in residents(loop):  # what failed on arrival is no reason to come back
            loop._residents.evict(slot_of(loop, client))
        assert client.row.worker_id is None
    client.optim_step(note=False)
    lab.work(loop)
    assert state_of(loop, client).same_bits(expected)


def test_a_run_that_was_given_back_is_another_workers_at_once(lab: Lab) -> None:
    first, second, client = lab.worker(), lab.worker(), lab.client()
    client.train(1)
    lab.work(first)
    first._residents.evict(slot_of(first, client))
    client.train(2)
    assert second.cycle()
    assert client.row.crash_count == 0
    assert_close(state_of(second, client), client.alone)


def test_runs_of_clients_that_are_gone_leave_their_slots(lab: Lab) -> None:
    loop = lab.worker()
    live, finished, silent, busy = (lab.client(rank=rank) for rank in (1, 2, 3, 4))
    lab.work(loop)
    for client in (live, finished, silent):
        client.train(1)
    lab.work(loop)
    _, step = busy.train(1)
    with lab.database.write() as session:
        session.get_one(ClientSession, finished.row.session_id).finished_at = utc_now()
        for client in (silent, busy):
            session.get_one(ClientSession, client.row.session_id).silent_since = utc_now()
    loop._residents.evict_abandoned()
    assert residents(loop) == {live.model_id, busy.model_id}
    assert finished.row.worker_id is None and silent.row.worker_id is None
    lab.work(loop)
    assert busy.operation(step).state == DONE
    silent.train(2)
    lab.work(loop)
    assert_close(state_of(loop, silent), silent.alone)


def test_an_unloaded_run_leaves_its_slot_when_it_has_done_what_it_took(lab: Lab) -> None:
    loop = lab.worker()
    kept, unloaded = lab.client(rank=1), lab.client(rank=2)
    lab.work(loop)
    _, step = unloaded.train(1)
    with lab.database.write() as session:
        log.unload(session, unloaded.model_id)
    loop._residents.evict_abandoned()
    assert residents(loop) == {kept.model_id, unloaded.model_id}
    lab.work(loop)
    assert unloaded.operation(step).state == DONE
    loop._residents.evict_abandoned()
    assert residents(loop) == {kept.model_id}
    assert unloaded.row.worker_id is None


def test_a_worker_that_stops_gives_everything_back_with_a_snapshot(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.train(1)
    lab.work(loop)
    loop._stopping.set()
    loop._thread.start()
    loop.stop(10)
    assert client.row.worker_id is None
    assert client.row.recovery_snapshot_id is not None
    with lab.database.read() as session:
        assert session.scalars(select(Run.id).where(Run.worker_id.is_not(None))).all() == []
    client.train(2)
    second = lab.worker()
    lab.work(second)
    assert_close(state_of(second, client), client.alone)


def test_a_request_of_a_newer_release_is_left_alone(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    lab.work(loop)
    _, step = client.train(1)
    with lab.database.write() as session:
        session.execute(
            update(Operation).where(Operation.model_id == client.model_id, Operation.seq_id == step).values(format=99)
        )
    lab.work(loop)
    assert client.row.applied_seq == step - 1
    assert client.operation(step).state == ACCEPTED
