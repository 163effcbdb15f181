"""More runs than slots: every run gets its turn, and none is other than it would have been alone."""

from __future__ import annotations

import pytest

from tests.unit.workers.train.train_lab import Client, Lab, assert_close, residents, slot_of, state_of
from workers.train.loop import TrainLoop

ROUNDS = 3


@pytest.mark.parametrize(("runs", "slots"), [(20, 4), pytest.param(200, 8, marks=pytest.mark.slow)])
def test_runs_that_step_in_turns_equal_their_solo_runs(lab: Lab, runs: int, slots: int) -> None:
    loop = lab.worker(train_slots=slots)
    clients = [lab.client(rank=1 + number % 3, seed=number) for number in range(runs)]
    for step in range(ROUNDS):
        for number, client in enumerate(clients):
            client.train(number % 7 + 10 * step)
            lab.work(loop)
            assert len(residents(loop)) <= slots
    assert [client.row.applied_seq for client in clients] == [2 * ROUNDS] * runs
    for client in clients:
        if client.model_id not in residents(loop):
            client.forward_backward(99)
            lab.work(loop)
        assert_close(state_of(loop, client), client.alone)


def keep_busy(lab: Lab, loop: TrainLoop, clients: list[Client], newcomer: Client, *, cycles: int) -> bool:
    """Every run but the newcomer always has work; whether that was served within so many cycles."""
    for number in range(cycles):
        for client in clients:
            if client.row.applied_seq >= client.next_seq - 3:
                client.train(number % 5)
        loop.cycle()
        if newcomer.row.applied_seq == newcomer.next_seq - 1:
            return True
    return False


def test_runs_that_always_have_work_do_not_starve_another(lab: Lab) -> None:
    loop = lab.worker(train_slots=8, slot_slice_s=1e-3)
    clients = [lab.client(rank=1 + number % 3, seed=number) for number in range(8)]
    lab.work(loop)
    newcomer = lab.client(rank=2, seed=50)
    newcomer.train(1)
    assert keep_busy(lab, loop, clients, newcomer, cycles=20)
    lab.work(loop)
    for client in [*clients, newcomer]:
        if client.model_id not in residents(loop):
            client.forward_backward(99)
            lab.work(loop)
        assert_close(state_of(loop, client), client.alone)


def test_a_run_keeps_its_slot_for_its_share_of_seconds(lab: Lab) -> None:
    loop = lab.worker(train_slots=2, slot_slice_s=3600.0)
    clients = [lab.client(rank=rank, seed=rank) for rank in (1, 2)]
    lab.work(loop)
    newcomer = lab.client(rank=3)
    assert not keep_busy(lab, loop, clients, newcomer, cycles=10)
    slot_of(loop, clients[1]).since -= 3600.0
    assert keep_busy(lab, loop, clients, newcomer, cycles=5)
    assert residents(loop) == {clients[0].model_id, newcomer.model_id}


def test_a_tenant_at_its_limit_shares_its_slots_between_its_runs(lab: Lab) -> None:
    loop = lab.worker(runs_per_tenant=2, slot_slice_s=1e-3)
    clients = [lab.client(rank=1)]
    clients.append(lab.client(rank=2, owner_id=clients[0].owner_id))
    lab.work(loop)
    newcomer = lab.client(rank=3, owner_id=clients[0].owner_id)
    assert keep_busy(lab, loop, clients, newcomer, cycles=20)
