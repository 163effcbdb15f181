"""Several workers of one pool: a run without a holder goes to the one with less to do, and idle runs move there."""

from __future__ import annotations

from sqlalchemy import update

from app.fleet.models import Worker
from app.fleet.service import set_draining
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, residents, state_of
from workers.train.loop import TrainLoop


def show(lab: Lab, loop: TrainLoop, **values: object) -> None:
    """What the worker's presence writes into its row, or values that the test says."""
    values = {
        "queued_tokens": loop.progress.queued_tokens,
        "resident_runs": loop.progress.resident_runs,
        "slots": 64,
    } | values
    with lab.database.write() as session:
        session.execute(update(Worker).where(Worker.id == loop._worker_id).values(**values))


def loaded(lab: Lab, *, runs: int = 1, **settings: object) -> tuple[TrainLoop, list[Client]]:
    """A worker that holds runs and has tokens in its queue."""
    loop, clients = lab.worker(**settings), [lab.client(rank=1, seed=50 + number) for number in range(runs)]
    lab.work(loop)
    clients[0].train(1)
    loop.cycle()  # the step of this training is done, and its tokens were the last that were queued
    assert residents(loop) == {client.model_id for client in clients} and loop.progress.queued_tokens > 0
    show(lab, loop)
    return loop, clients


def test_a_new_run_goes_to_the_worker_with_fewer_queued_tokens(each_lab: Lab) -> None:
    lab = each_lab
    busy, (one,) = loaded(lab)
    idle = lab.worker()
    one.train(2)
    new = lab.client(rank=2)
    new.train(1)
    busy.cycle()
    assert new.row.worker_id is None and one.row.applied_seq == 4
    lab.work(idle)
    assert residents(idle) == {new.model_id} and residents(busy) == {one.model_id}
    assert_close(state_of(idle, new), new.alone)


def test_a_run_that_the_other_does_not_take_is_taken_after_a_moment(lab: Lab) -> None:
    busy, (one,) = loaded(lab, claim_interval_s=1e-6)
    lab.worker()
    one.train(2)
    new = lab.client(rank=2)
    lab.work(busy)
    one.train(3)
    lab.work(busy)
    assert new.row.worker_id == busy._worker_id


def test_workers_that_cannot_take_a_run_are_not_waited_for(lab: Lab) -> None:
    busy, (one,) = loaded(lab)
    full, draining, stopping, silent = (lab.worker() for _ in range(4))
    show(lab, full, slots=1, resident_runs=1)
    with lab.database.write() as session:
        set_draining(session, draining._worker_id, True)
    stopping._residents.leave()
    lab.kill(silent)
    one.train(2)
    new = lab.client(rank=2)
    lab.work(busy)
    assert new.row.worker_id == busy._worker_id


def test_a_full_worker_evicts_nothing_for_a_run_that_another_has_a_slot_for(lab: Lab) -> None:
    full, other, kept = lab.worker(train_slots=1), lab.worker(), lab.client(rank=1)
    kept.train(1)
    lab.work(full)
    show(lab, full, slots=1)
    new = lab.client(rank=2)
    lab.work(full)
    assert residents(full) == {kept.model_id}
    lab.work(other)
    assert residents(other) == {new.model_id}


def test_a_forgotten_run_is_taken_again_whatever_others_have_to_do(lab: Lab) -> None:
    """Its lease is still ours, so nobody else could."""
    busy, (one, two) = loaded(lab, runs=2)
    lab.worker()
    busy._residents.drop(two.model_id)
    one.train(2)
    two.train(1)
    lab.work(busy)
    assert two.row.applied_seq == 2


def test_a_run_whose_worker_has_died_is_taken_at_once_whatever_others_have_to_do(lab: Lab) -> None:
    busy, (one,) = loaded(lab)
    dead, theirs = lab.worker(), lab.client(rank=2)
    lab.work(dead)
    lab.kill(dead)
    lab.worker()
    one.train(2)
    theirs.train(1)
    lab.work(busy)
    assert theirs.row.applied_seq == 2 and theirs.row.worker_id == busy._worker_id


def test_idle_runs_move_from_a_loaded_worker_and_their_clients_notice_nothing(each_lab: Lab) -> None:
    lab = each_lab
    busy, clients = loaded(lab, runs=4)
    one, *others = clients
    for client in others:
        client.train(3)
    lab.work(busy)
    for client in others:
        client.forward_backward(4)  # a gradient that no step has taken yet
    lab.work(busy)
    one.train(2)
    busy.cycle()
    other = lab.worker()
    busy._residents.give_up_idle()
    moved = [client for client in others if client.row.worker_id is None]
    assert len(moved) == 2
    one.train(5)
    for client in moved:
        client.optim_step()
    busy.cycle()
    lab.work(other)
    assert residents(other) == {client.model_id for client in moved}
    for client in clients:
        assert client.row.applied_seq == client.next_seq - 1 and client.row.crash_count == 0
        assert_close(state_of(other if client in moved else busy, client), client.alone)


def test_runs_stay_where_they_are_while_no_worker_is_loaded(lab: Lab) -> None:
    loop, clients = lab.worker(), [lab.client(rank=1, seed=seed) for seed in range(4)]
    lab.work(loop)
    lab.worker()
    loop._residents.give_up_idle()
    assert residents(loop) == {client.model_id for client in clients}


def test_a_busy_loop_gives_up_runs_too(lab: Lab) -> None:
    """It never sleeps, so this has to happen between cycles."""
    loop, clients = loaded(lab, runs=4)
    lab.worker()
    one = clients[0]
    tidied: list[int] = []
    tidy = loop._residents.tidy

    def keep_busy_until_tidied() -> None:
        tidy()
        tidied.append(len(residents(loop)))
        if len(tidied) < 5 and len(residents(loop)) == 4:
            one.train(len(tidied))
        else:
            loop._stopping.set()

    loop._residents.tidy = keep_busy_until_tidied  # type: ignore[method-assign]
    one.train(9)
    loop.ring()
    loop._run()
    assert 0 < tidied[-1] < 4


def test_a_worker_that_mostly_waits_gives_up_nothing(lab: Lab) -> None:
    """Else a run that it takes back, because nobody else hears of it first, would come and go for ever."""
    loop, clients = loaded(lab, runs=4)
    lab.worker()
    loop.progress.waited_s += 3600.0
    loop._residents.tidy()
    assert residents(loop) == {client.model_id for client in clients}
