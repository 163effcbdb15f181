"""While a save's files are being written: other runs train, its own run computes on, and nothing overtakes it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from app.runs.log import ACCEPTED, DONE
from app.storage.blobs import LocalBlobStore
from tests.integration.test_train_loop_saves import path_of
from tests.services import wait_for
from tests.unit.workers.train.train_lab import (
    Killed,
    Lab,
    assert_close,
    break_passes,
    residents,
    slot_of,
    state_of,
)
from workers.train import held, snapshots
from workers.train.loop import TrainLoop


class SlowBlobs(LocalBlobStore):
    """A blob store whose snapshots are written only once it may."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.go = threading.Event()
        self.broken = False
        self.failures = 0

    def put(self, key: str, data: bytes) -> None:
        if key.startswith("snapshots/"):
            assert self.go.wait(30)
            if self.broken:
                self.failures += 1
                raise OSError("no space left on device")
        super().put(key, data)


@pytest.fixture
def slow(lab: Lab) -> SlowBlobs:
    """The lab's blob store, which writes no snapshot yet."""
    lab.blobs = SlowBlobs(lab.blob_folder)
    return lab.blobs


def turn(loop: TrainLoop) -> None:
    """Cycles until there is nothing to do but wait."""
    while loop.cycle():
        pass


def test_other_runs_train_while_a_save_is_written(lab: Lab, slow: SlowBlobs) -> None:
    loop, saving, other = lab.worker(), lab.client(rank=2), lab.client(rank=3)
    save = saving.save("slow")
    turn(loop)
    _, step = other.train(1)
    turn(loop)
    assert other.operation(step).state == DONE
    assert saving.operation(save).state == ACCEPTED
    slow.go.set()
    lab.work(loop)
    assert saving.result(save)["path"] == path_of(saving, "slow")
    assert_close(state_of(loop, other), other.alone)


@pytest.mark.parametrize("kind", ["state", "sampler", "external"])
def test_its_own_run_computes_on_but_finishes_nothing_before_it(lab: Lab, slow: SlowBlobs, kind: str) -> None:
    loop, client = lab.worker(), lab.client()
    client.train(1)
    turn(loop)
    before = state_of(loop, client)
    save = {"state": client.save, "sampler": lambda name: client.save_for_sampler(path=name)}.get(
        kind, lambda name: client._json(lab.service.save_weights_external, path=name)
    )("slow")
    later = client.train(2)
    turn(loop)
    assert state_of(loop, client).step == 2
    assert [client.operation(seq_id).state for seq_id in (save, *later)] == [ACCEPTED] * 3
    assert client.row.applied_seq == save - 1
    slow.go.set()
    lab.work(loop)
    assert [client.operation(seq_id).state for seq_id in (save, *later)] == [DONE] * 3
    assert client.row.applied_seq == later[-1]
    assert_close(state_of(loop, client), client.alone)
    if kind == "state":
        saved = snapshots.read_state(
            lab.blobs, lab.snapshot_of(client, "weights", "slow"), lab.base, "adamw", optimizer=True
        )
        assert torch.equal(saved.adapter.flat, before.flat) and torch.equal(saved.optimizer.m, before.m)


def test_the_next_save_of_the_run_waits(lab: Lab, slow: SlowBlobs) -> None:
    """Else two saves of one name would not know of each other."""
    loop, client = lab.worker(), lab.client()
    first, second = client.save("name"), client.save("name")
    client.train(1)
    turn(loop)
    assert state_of(loop, client).step == 0
    slow.go.set()
    lab.work(loop)
    assert client.operation(first).state == DONE
    assert client.error(second)[0] == "user"
    assert_close(state_of(loop, client), client.alone)


def test_no_more_than_so_many_results_are_held(lab: Lab, slow: SlowBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held, "MOST_HELD", 3)
    loop, client = lab.worker(), lab.client()
    client.save("slow")
    for data in range(4):
        client.train(data)
    turn(loop)
    assert len(slot_of(loop, client).held) == 3
    slow.go.set()
    lab.work(loop)
    assert_close(state_of(loop, client), client.alone)


def test_a_worker_that_dies_meanwhile_leaves_it_all_to_the_next(each_lab: Lab) -> None:
    lab = each_lab
    blobs = lab.blobs = SlowBlobs(lab.blob_folder)
    first, client = lab.worker(), lab.client()
    client.train(1)
    turn(first)
    save = client.save("slow")
    later = client.train(2)
    turn(first)
    lab.expire(first)
    blobs.go.set()
    second = lab.worker()
    lab.work(second)
    assert [client.operation(seq_id).state for seq_id in (save, *later)] == [DONE] * 3
    named = lab.snapshot_of(client, "weights", "slow")
    lab.work(first)
    assert residents(first) == set(), "what the first had held is fenced off"
    assert lab.snapshot_of(client, "weights", "slow") == named
    client.train(3)
    lab.work(second)
    assert_close(state_of(second, client), client.alone)


def test_a_save_that_cannot_be_written_fails_and_what_came_behind_it_stands(lab: Lab, slow: SlowBlobs) -> None:
    loop, client = lab.worker(), lab.client()
    slow.broken = True
    save = client.save_for_sampler(path="name")
    later = client.train(1)
    turn(loop)
    slow.go.set()
    lab.work(loop)
    assert client.error(save)[0] == "server"
    assert [client.operation(seq_id).state for seq_id in later] == [DONE] * 2
    assert client.row.sampler_snapshot_id is None
    slow.broken = False
    again = client.save_for_sampler(path="name")
    lab.work(loop)
    assert client.operation(again).state == DONE
    assert_close(state_of(loop, client), client.alone)


def test_a_pass_that_brings_workers_down_behind_a_save_is_given_up_and_the_save_is_done(
    lab: Lab, slow: SlowBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = lab.client(rank=2)
    save, bad = client.save("kept"), client.forward_backward(9)
    deaths = 0
    with monkeypatch.context() as patch:
        break_passes(patch, client, Killed())
        while client.operation(bad).state == ACCEPTED:
            loop = lab.worker()
            try:
                lab.work(loop)
            except Killed:
                deaths += 1
            slow.go.set()
            lab.kill(loop)
    assert client.operation(save).state == DONE
    assert client.error(bad)[0] == "server"
    assert deaths <= 4


def test_a_run_with_a_save_on_its_way_keeps_its_slot(lab: Lab, slow: SlowBlobs) -> None:
    loop, client = lab.worker(train_slots=1), lab.client(rank=2)
    client.save("slow")
    turn(loop)
    other = lab.client(rank=3)
    other.train(1)
    turn(loop)
    assert residents(loop) == {client.model_id}
    slow.go.set()
    lab.work(loop)
    lab.work(loop)
    assert_close(state_of(loop, other), other.alone)


def test_a_worker_that_stops_commits_the_saves_that_are_written_in_time(lab: Lab, slow: SlowBlobs) -> None:
    loop, client = lab.worker(), lab.client()
    save = client.save("slow")
    later = client.train(1)
    loop._thread.start()
    loop.ring()
    wait_for(lambda: client.model_id in residents(loop) and len(slot_of(loop, client).held) == 3)
    stopping = threading.Thread(target=loop.stop, args=(30,))
    stopping.start()
    slow.go.set()
    stopping.join()
    assert [client.operation(seq_id).state for seq_id in (save, *later)] == [DONE] * 3
    assert client.row.worker_id is None


def test_a_worker_that_cannot_wait_gives_the_run_back_as_the_log_has_it(
    lab: Lab, slow: SlowBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.train.loop._SAVES_END_S", 0.0)
    loop, client = lab.worker(), lab.client()
    save = client.save("slow")
    later = client.train(1)
    loop._thread.start()
    loop.ring()
    wait_for(lambda: client.model_id in residents(loop) and len(slot_of(loop, client).held) == 3)
    loop._stopping.set()
    loop.ring()
    loop._thread.join(30)
    assert client.row.worker_id is None and client.row.applied_seq == save - 1
    slow.go.set()
    second = lab.worker()
    lab.work(second)
    assert [client.operation(seq_id).state for seq_id in (save, *later)] == [DONE] * 3
    assert_close(state_of(second, client), client.alone)
