"""Real workers end by SIGKILL or `os._exit` in the middle of their work; others finish it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.wire.types import Datum
from tests.faults import audit
from tests.faults.conftest import RealWorker, StartWorker, free, wait_applied
from tests.faults.worker import DEADLY_EXIT_CODE
from tests.services import wait_for
from tests.unit.workers.train.train_lab import Client, Lab, State, assert_close, state_of
from workers.train.planner import MAX_CRASHES

SIGKILLED = -9
FATAL = (
    "commit: move the position|before|4",
    "notify|before|3",
    "snapshot: name it in the run's row|after|1",
)
MARKER = "7,7,7"


def train_until_ended(client: Client, workers: Sequence[RealWorker]) -> int:
    """Steps, one request at a time, until all workers have ended; returns how many requests that took."""
    count = 0

    def over() -> bool:
        return client.row.applied_seq == client.next_seq - 1 or not any(worker.is_alive for worker in workers)

    while any(worker.is_alive for worker in workers):
        act(client, count)
        count += 1
        wait_for(over, 60)
        assert count < 60, "\n".join(worker.log[-2000:] for worker in workers)
    return count


def act(client: Client, number: int) -> None:
    if number % 3 == 2:
        client.optim_step()
    else:
        client.forward_backward(number)


def test_workers_killed_while_they_commit_notify_and_snapshot_leave_the_same_bits(
    real_lab: Lab, start_worker: StartWorker
) -> None:
    doomed = [start_worker(FAULTS_DIE=fatal) for fatal in FATAL]
    for worker in doomed:
        worker.wait_ready()
    client = real_lab.client()
    count = train_until_ended(client, doomed)
    assert [worker.process.wait() for worker in doomed] == [SIGKILLED] * len(doomed)
    act(client, count)
    loop = real_lab.worker()
    wait_for(lambda: real_lab.work(loop) or client.row.applied_seq == client.next_seq - 1)
    real_lab.work(loop)
    audit.assert_exactly_once(real_lab.database, client.model_id, client.next_seq - 1)
    assert state_of(loop, client).same_bits(solo(real_lab, count + 1))


def solo(lab: Lab, count: int) -> State:
    """The state of a run that nothing has disturbed."""
    loop, quiet = lab.worker(), lab.client()
    lab.work(loop)
    for number in range(count):
        act(quiet, number)
        lab.work(loop)
    return state_of(loop, quiet)


def test_an_operation_that_ends_its_worker_fails_after_three_deaths_and_two_tenants_notice_nothing(
    real_lab: Lab, start_worker: StartWorker
) -> None:
    workers = [start_worker(FAULTS_DEADLY=MARKER) for _ in range(MAX_CRASHES)]
    for worker in workers:
        worker.wait_ready()
    sick, *others = [real_lab.client(rank=rank, seed=rank) for rank in (2, 3, 4)]
    for client in (sick, *others):
        client.train(1)
    for client in (sick, *others):
        wait_applied(client, *workers)
    deadly = sick.send([Datum(np.array([7, 7, 7, 1], np.int32), {"target_tokens": np.arange(4)})])
    good, step = sick.forward_backward(2), sick.optim_step()
    for number in (2, 3):
        for client in others:
            client.train(number)
    assert [worker.process.wait(60) for worker in workers] == [DEADLY_EXIT_CODE] * MAX_CRASHES
    last = real_lab.worker()

    def done() -> bool:
        real_lab.work(last)
        return all(client.row.applied_seq == client.next_seq - 1 for client in (sick, *others))

    wait_for(done, 60)
    category, error = sick.error(deadly)
    assert category == "server" and "all 3 attempts ended in the death of their worker" in error
    assert sick.output(good) and sick.metrics(step)["failed_operations"] == 1
    for client in (sick, *others):
        audit.assert_exactly_once(real_lab.database, client.model_id, client.next_seq - 1)
        quiet = real_lab.client(rank=client.rank, seed=client.rank)
        for number in (1, 2) if client is sick else (1, 2, 3):
            quiet.train(number)
        real_lab.work(last)
        free(real_lab, client)
        real_lab.restore(last, client)
        assert_close(state_of(last, client), state_of(last, quiet))
