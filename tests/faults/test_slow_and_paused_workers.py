"""Real workers that are slow, or stand still: the lease tells one from the other."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from app.runs.log import ACCEPTED
from tests.faults import audit
from tests.faults.conftest import LEASE_S, RealWorker, StartWorker, free, wait_applied
from tests.services import wait_for
from tests.unit.workers.train.train_lab import Client, Lab, State, assert_close, state_of


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """While this file is there, passes of the real worker wait."""
    return tmp_path / "gate"


@pytest.fixture
def worker(start_worker: StartWorker, gate: Path) -> RealWorker:
    started = start_worker(FAULTS_HOLD=str(gate))
    started.wait_ready()
    return started


def enter_pass(client: Client, worker: RealWorker, gate: Path) -> int:
    """Let the worker begin a pass with a request of the client, and not end it."""
    gate.touch()
    number = client.forward_backward(2)
    worker.wait(gate.with_suffix(".reached").exists)
    return number


def solo(lab: Lab, client: Client) -> State:
    """The state of the client's script when nothing happens; the real workers have ended."""
    loop, quiet = lab.worker(), lab.client(rank=client.rank, seed=client.seed)
    for kind, number in client.script:
        quiet.forward_backward(number) if kind == "fb" else quiet.optim_step()
        lab.work(loop)
    return state_of(loop, quiet)


def test_a_pass_of_five_leases_is_done_once_and_nobody_takes_over(
    real_lab: Lab, worker: RealWorker, gate: Path
) -> None:
    client = real_lab.client()
    client.train(1)
    wait_applied(client, worker)
    before = client.row
    number = enter_pass(client, worker, gate)
    other, end = real_lab.worker(), time.monotonic() + 5 * LEASE_S
    while time.monotonic() < end:
        assert not other.cycle()
    assert client.operation(number).state == ACCEPTED
    gate.unlink()
    client.optim_step()
    wait_applied(client, worker)
    after = client.row
    assert (after.worker_id, after.epoch, after.crash_count) == (before.worker_id, before.epoch, 0)
    audit.assert_exactly_once(real_lab.database, client.model_id, client.next_seq - 1)
    worker.end()
    free(real_lab, client)
    real_lab.restore(other, client)
    assert_close(state_of(other, client), solo(real_lab, client))


def test_a_worker_that_stood_still_for_longer_than_its_lease_commits_nothing_and_serves_others(
    real_lab: Lab, worker: RealWorker, gate: Path
) -> None:
    client, neighbour = real_lab.client(rank=2), real_lab.client(rank=3)
    for one in (client, neighbour):
        one.train(1)
        wait_applied(one, worker)
    paused_in = enter_pass(client, worker, gate)
    worker.send(signal.SIGSTOP)
    other = real_lab.worker()

    def taken_over() -> bool:
        real_lab.work(other)
        return client.operation(paused_in).state != ACCEPTED

    wait_for(taken_over, 60)
    client.optim_step()
    real_lab.work(other)
    held = client.row
    assert held.worker_id == other._worker_id
    told = client.operation(paused_in)

    gate.unlink()
    worker.send(signal.SIGCONT)
    worker.wait(lambda: "lease_lost" in worker.log)
    assert (client.row.applied_seq, client.row.epoch) == (held.applied_seq, held.epoch)
    assert client.operation(paused_in).finished_at == told.finished_at

    neighbour.train(2)
    wait_applied(neighbour, worker)
    row = worker.row
    assert row is not None and neighbour.row.worker_id == row.id
    worker.wait(lambda: worker.row is not None and worker.row.resident_runs == 1)

    other.hand_over()
    client.train(3)
    wait_applied(client, worker)
    assert client.row.worker_id == row.id
    worker.end()
    for one in (client, neighbour):
        audit.assert_exactly_once(real_lab.database, one.model_id, one.next_seq - 1)
        free(real_lab, one)
        real_lab.restore(other, one)
        assert_close(state_of(other, one), solo(real_lab, one))
