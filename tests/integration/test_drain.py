"""`tinworks workers drain`: a worker is emptied and the clients of its runs notice nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from unittest.mock import Mock

import pytest
from sqlalchemy.orm import Session

from app.fleet.models import Worker
from app.fleet.overview import seen_workers
from app.fleet.service import register_worker, set_draining
from app.runs.log import DONE
from tests import factories
from tests.services import wait_for
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, residents, state_of
from workers.model.forward import Outcome, Work
from workers.presence import HUNG_EXIT_CODE, Presence
from workers.train.loop import TrainLoop


@dataclass
class Shown:
    """A train worker as its presence shows it."""

    lab: Lab
    train: TrainLoop
    asked: list[bool] = field(default_factory=list)

    @property
    def worker_id(self) -> str:
        return self.train._worker_id

    @property
    def is_empty(self) -> bool:
        return not self.train.progress.resident_runs

    def register(self, session: Session) -> None:
        register_worker(
            session, worker_id=self.worker_id, pool=factories.POOL, roles=["train"], host="h", pid=1, slots=4
        )

    def drain(self, draining: bool) -> None:
        self.asked.append(draining)
        self.train.drain(draining)


def presence_of(lab: Lab, loop: TrainLoop) -> tuple[Shown, Presence]:
    shown = Shown(lab, loop)
    return shown, Presence(shown, lab.settings)


def ask(lab: Lab, name: str, draining: bool) -> list[str]:
    with lab.database.write() as session:
        return set_draining(session, name, draining)


def state(lab: Lab, worker_id: str) -> str:
    with lab.database.read() as session:
        return next(worker.state for worker in seen_workers(session, silence_s=12) if worker.id == worker_id)


def test_a_drained_worker_hands_its_runs_over_with_their_state(each_lab: Lab) -> None:
    lab = each_lab
    leaving, staying = lab.worker(), lab.worker()
    client = lab.client()
    client.train(1)
    client.forward_backward(2)  # a gradient that no step has taken yet
    lab.work(leaving)
    assert residents(leaving) == {client.model_id}
    leaving.hand_over()
    assert residents(leaving) == set() and client.row.worker_id is None
    client.optim_step()
    lab.work(staying)
    assert residents(staying) == {client.model_id}
    assert_close(state_of(staying, client), client.alone)


def test_a_worker_hears_that_it_shall_drain_empties_itself_and_says_so(lab: Lab) -> None:
    loop = lab.worker()
    shown, presence = presence_of(lab, loop)
    client = lab.client()
    client.train(1)
    thread = threading.Thread(target=loop._run)
    thread.start()
    try:
        loop.ring()
        wait_for(lambda: client.row.applied_seq == 2)
        assert ask(lab, loop._worker_id, True) == [loop._worker_id]
        presence.beat()
        assert shown.asked == [True]
        wait_for(lambda: client.row.worker_id is None)
        presence.beat()
        presence.beat()
        assert state(lab, loop._worker_id) == "drained" and shown.asked == [True]

        client.train(2)
        loop.ring()
        ask(lab, loop._worker_id, False)
        assert client.row.worker_id is None and client.row.applied_seq == 2
        presence.beat()
        wait_for(lambda: client.row.applied_seq == 4)
    finally:
        loop._stopping.set()
        loop.ring()
        thread.join(30)
        presence.stop()


def test_a_draining_worker_takes_nothing(lab: Lab) -> None:
    loop = lab.worker(claim_interval_s=0.01)
    loop.drain(True)
    client = lab.client()
    thread = threading.Thread(target=loop._run)
    thread.start()
    turned = threading.Event()
    loop._engine.idle = turned.set  # type: ignore[method-assign]
    try:
        assert turned.wait(30)
        turned.clear()
        assert turned.wait(30)
        assert client.row.worker_id is None
    finally:
        loop._stopping.set()
        thread.join(30)


def test_a_row_that_was_lost_is_written_anew(lab: Lab) -> None:
    loop = lab.worker()
    _, presence = presence_of(lab, loop)
    with lab.database.write() as session:
        session.delete(session.get_one(Worker, loop._worker_id))
    presence.beat()
    assert state(lab, loop._worker_id) == "ready"
    presence.stop()


def test_all_workers_of_a_host_are_drained_together(lab: Lab) -> None:
    names = [lab.worker()._worker_id, lab.worker()._worker_id]
    assert ask(lab, "test", True) == sorted(names)
    assert ask(lab, "no-such-worker", True) == []
    assert {state(lab, name) for name in names} == {"draining"}


def test_a_worker_shows_what_it_measures_in_its_row(each_lab: Lab) -> None:
    loop = each_lab.worker()
    client = each_lab.client()
    client.train(1)
    each_lab.work(loop)
    _, presence = presence_of(each_lab, loop)
    presence.show_metrics()
    with each_lab.database.read() as session:
        (packed,) = [worker.packed for worker in seen_workers(session, silence_s=12) if worker.id == loop._worker_id]
    shown = {name: value for family in packed for name, labels, value in family["samples"] if not labels}
    assert shown["tinworks_resident_runs"] == 1 and shown["tinworks_snapshot_lag_operations"] == 3
    presence.stop()


def test_a_lease_is_renewed_whatever_becomes_of_the_metrics(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = lab.worker(lease_s=0.15)
    client = lab.client()
    lab.work(loop)
    shown = Shown(lab, loop)
    presence = Presence(shown, lab.settings.model_copy(update={"lease_s": 0.15}))
    tries: list[float] = []

    def broken() -> None:
        tries.append(client.row.lease_expires_at or 0.0)
        raise RuntimeError("cannot be packed")

    monkeypatch.setattr(presence, "show_metrics", broken)
    presence.start()
    try:
        wait_for(lambda: len(tries) >= 3)
        assert tries[2] > tries[1] > 0
    finally:
        presence.stop()


# -- a worker that is stopped, or whose loop hangs or dies


def held_in_a_pass(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> tuple[TrainLoop, Client, threading.Event, int]:
    """A running loop that is in the middle of a pass, until the event."""
    loop, client, go_on, reached = lab.worker(), lab.client(), threading.Event(), threading.Event()
    lab.work(loop)
    real = loop._engine.run_pass

    def waiting(works: Sequence[Work]) -> list[Outcome]:
        reached.set()
        assert go_on.wait(60)
        return real(works)

    monkeypatch.setattr(loop._engine, "run_pass", waiting)
    number = client.forward_backward(1)
    loop._thread.start()
    assert reached.wait(30)
    return loop, client, go_on, number


def test_a_worker_that_is_stopped_in_a_long_pass_gives_its_runs_back_and_that_is_no_crash(
    each_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = each_lab
    loop, client, go_on, number = held_in_a_pass(lab, monkeypatch)
    _, presence = presence_of(lab, loop)
    began = time.monotonic()
    loop.stop(0.2)
    presence.stop()
    assert time.monotonic() - began < 5
    assert client.row.worker_id is None and client.row.crash_count == 0
    other = lab.worker()
    lab.work(other)
    told = client.operation(number)
    assert told.state == DONE and client.row.crash_count == 0
    go_on.set()
    loop._thread.join(30)
    assert client.row.worker_id == other._worker_id and client.operation(number).finished_at == told.finished_at
    client.optim_step()
    lab.work(other)
    assert_close(state_of(other, client), client.alone)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which the process would have ended."""
    codes: list[int] = []
    monkeypatch.setattr("workers.presence.os._exit", codes.append)
    return codes


@pytest.mark.parametrize("phase", ["claim", "restore", "pass", "commit", "notify"])
def test_a_loop_that_hangs_ends_its_process(lab: Lab, ends: list[int], phase: str) -> None:
    loop = lab.worker(max_pass_s=0.05)
    presence = Presence(Shown(lab, loop), lab.settings.model_copy(update={"max_pass_s": 0.05}))
    with loop.progress.during(phase):
        presence._end_if_hung()
        assert ends == []
        time.sleep(0.1)
        loop.progress.moves()
        presence._end_if_hung()
        assert ends == []
        time.sleep(0.1)
        presence._end_if_hung()
        assert ends == [HUNG_EXIT_CODE]
    time.sleep(0.1)
    presence._end_if_hung()
    assert len(ends) == 1
    presence.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_loop_that_has_died_ends_its_process(lab: Lab, ends: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = lab.worker(claim_interval_s=0.01)
    _, presence = presence_of(lab, loop)
    presence._end_if_hung()
    assert ends == []
    monkeypatch.setattr(loop, "cycle", Mock(side_effect=KeyboardInterrupt))
    loop._thread.start()
    loop._thread.join(30)
    presence._end_if_hung()
    assert ends == [HUNG_EXIT_CODE]
    loop.stop(1)
    presence._end_if_hung()
    assert len(ends) == 1
    presence.stop()
