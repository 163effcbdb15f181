"""Workers of two releases serve side by side during an upgrade: what the older cannot read is left to the newer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from app.runs import log
from app.runs.log import ACCEPTED
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, residents, slot_of, state_of
from workers.train import residency, snapshots
from workers.train.loop import TrainLoop

Release = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch) -> Release:
    """A block of the older release: it reads and writes rows and snapshots of one format less than the newest."""

    @contextmanager
    def release() -> Iterator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(log, "LOG_FORMAT", 1)
            patch.setattr(snapshots, "STATE_FORMAT", 1)
            yield

    monkeypatch.setattr(log, "LOG_FORMAT", 2)
    return release


def worker(lab: Lab) -> TrainLoop:
    """A worker that leaves no run to others for a moment only because they have room."""
    return lab.worker(claim_interval_s=0.0)


def times_left(lab: Lab) -> int:
    """How often a run was found to be one for a newer release."""
    return len([line for line in lab.logs if line["event"] == "left_to_newer_release"])


def test_rows_of_the_newer_release_wait_for_its_worker_and_the_rest_goes_on(each_lab: Lab, older: Release) -> None:
    lab = each_lab
    old = worker(lab)
    with older():
        moving, staying = lab.client(), lab.client(seed=2)
        moving.train(1)
        lab.work(old)
    moving.train(2)
    with older():
        moving.train(3)
        _, last = staying.train(4)
        lab.work(old)
        assert residents(old) == {moving.model_id, staying.model_id}
        old._residents.evict_abandoned()
        lab.work(old)
        assert residents(old) == {staying.model_id}
        assert moving.row.worker_id is None and moving.row.applied_seq == 2
        assert moving.operation(3).state == ACCEPTED
    new = worker(lab)
    lab.work(new)
    assert residents(new) == {moving.model_id}
    assert_close(state_of(new, moving), moving.alone)
    assert staying.row.applied_seq == last
    assert_close(state_of(old, staying), staying.alone)


def left_to_the_newer(lab: Lab, older: Release, client: Client, old: TrainLoop) -> TrainLoop:
    """The older release's worker leaves a free run with work alone; a newer one takes it."""
    with older():
        client.forward_backward(7)
        for _ in range(3):
            lab.work(old)
        assert residents(old) == set()
        assert client.row.worker_id is None and client.row.crash_count == 0
        assert times_left(lab) == 1
    new = worker(lab)
    lab.work(new)
    assert residents(new) == {client.model_id}
    return new


def test_a_snapshot_of_the_newer_release_is_restored_by_its_workers_only(lab: Lab, older: Release) -> None:
    """The older one knows no optimizer but AdamW."""
    first = worker(lab)
    with older():
        client = lab.client(optimizer="dimuon")
        client.train(1)
    lab.work(first)
    before = state_of(first, client)
    first.hand_over()
    new = left_to_the_newer(lab, older, client, worker(lab))
    assert slot_of(new, client).applied_seq == 3
    assert (state_of(new, client).flat == before.flat).all()


def test_rows_of_the_newer_release_are_replayed_by_its_workers_only(lab: Lab, older: Release) -> None:
    first = worker(lab)
    with older():
        client = lab.client()
        client.train(1)
    client.train(2)
    lab.work(first)
    first._residents.drop_all()
    new = left_to_the_newer(lab, older, client, worker(lab))
    assert_close(state_of(new, client), client.alone)


def test_a_run_that_was_left_to_the_newer_release_is_tried_again_later(
    lab: Lab, older: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an upgrade that was taken back there may be nobody else; the log of the worker says what it waits for."""
    monkeypatch.setattr(residency, "_LEFT_S", 0.0)
    first, client = worker(lab), lab.client(optimizer="dimuon")
    client.train(1)
    lab.work(first)
    first.hand_over()
    old = worker(lab)
    with older():
        client.forward_backward(2)
        for _ in range(3):
            old.cycle()
    assert times_left(lab) == 3


def test_a_checkpoint_of_the_newer_release_is_loaded_by_its_workers_only(lab: Lab, older: Release) -> None:
    new, old = worker(lab), worker(lab)
    source = lab.client(optimizer="dimuon")
    source.train(1)
    source.save("here")
    path = f"tinker://{source.model_id}/weights/here"
    lab.work(new)
    new.hand_over()
    with older():
        client = lab.client(owner_id=source.owner_id, optimizer="dimuon", seed=2)
        client.train(2)
        lab.work(old)
        loading = client.load(path, optimizer=True)
        after = client.forward_backward(3)
        for _ in range(3):
            lab.work(old)
        assert residents(old) == set() and times_left(lab) == 1
        assert client.operation(loading).state == client.operation(after).state == ACCEPTED
        assert client.row.worker_id is None and client.row.crash_count == 0
    lab.work(new)
    assert client.result(loading)["path"] == path
    assert client.row.applied_seq == after
