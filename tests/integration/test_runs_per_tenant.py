"""`TINWORKS_RUNS_PER_TENANT`: one tenant cannot fill all slots, and none of his runs is refused or lost for it."""

from __future__ import annotations

from tests import factories
from tests.unit.workers.train.train_lab import Lab, assert_close, residents, state_of


def owner(lab: Lab) -> str:
    with lab.database.write() as session:
        return str(factories.add_owner(session).id)


def test_a_tenant_has_no_more_runs_in_slots_than_the_limit(each_lab: Lab) -> None:
    lab = each_lab
    loop = lab.worker(runs_per_tenant=2)
    greedy, other = owner(lab), owner(lab)
    mine = [lab.client(owner_id=greedy, seed=seed) for seed in range(4)]
    theirs = lab.client(owner_id=other)
    for client in [*mine, theirs]:
        client.train(1)
    loop.cycle()
    held = residents(loop)
    assert theirs.model_id in held and len(held & {client.model_id for client in mine}) == 2


def test_runs_that_waited_are_trained_when_others_of_their_tenant_have_no_work(lab: Lab) -> None:
    loop = lab.worker(runs_per_tenant=2)
    mine = owner(lab)
    clients = [lab.client(owner_id=mine, seed=seed) for seed in range(5)]
    for round_ in range(2):
        for client in clients:
            client.train(round_)
        lab.work(loop)
    assert [client.row.applied_seq for client in clients] == [4] * 5
    assert len(residents(loop)) == 2
    kept = next(client for client in clients if client.model_id in residents(loop))
    assert_close(state_of(loop, kept), kept.alone)


def test_the_limit_counts_the_runs_that_other_workers_hold(lab: Lab) -> None:
    first, second = lab.worker(runs_per_tenant=1), lab.worker(runs_per_tenant=1)
    mine = owner(lab)
    held, waiting = lab.client(owner_id=mine), lab.client(owner_id=mine, seed=2)
    lab.restore(first, held)
    lab.work(second)
    assert residents(second) == set() and waiting.row.applied_seq == -1


def test_runs_of_a_dead_worker_do_not_keep_each_other_out(each_lab: Lab) -> None:
    lab = each_lab
    first, second = lab.worker(runs_per_tenant=2), lab.worker(runs_per_tenant=2)
    mine = owner(lab)
    clients = [lab.client(owner_id=mine, seed=seed) for seed in range(2)]
    lab.work(first)
    for client in clients:
        client.train(1)
    lab.kill(first)
    lab.work(second)
    assert residents(second) == {client.model_id for client in clients}
    assert [client.row.applied_seq for client in clients] == [2, 2]


def test_runs_that_a_worker_has_forgotten_are_taken_again(lab: Lab) -> None:
    loop = lab.worker(runs_per_tenant=1)
    client = lab.client(owner_id=owner(lab))
    lab.work(loop)
    loop._residents.drop(client.model_id)  # as after a commit that failed: its lease is still ours
    client.train(1)
    lab.work(loop)
    assert client.row.applied_seq == 2
