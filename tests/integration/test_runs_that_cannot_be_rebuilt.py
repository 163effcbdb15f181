"""Runs whose state cannot be rebuilt: their clients are told, soon and why, and nobody else pays."""

from __future__ import annotations

import pytest
from sqlalchemy import delete
from structlog.testing import capture_logs

from app.checkpoints.models import Snapshot
from app.checkpoints.service import snapshot_folder
from app.errors import StorageUnavailable
from app.runs.log import ACCEPTED, DONE, FAILED
from app.storage.blobs import LocalBlobStore
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, residents, state_of
from workers import metrics
from workers.train import recovery
from workers.train.loop import TrainLoop
from workers.train.planner import MAX_CRASHES

OFTEN, NEVER = {"snapshot_operations": 2}, {"snapshot_operations": 10_000}


def left_behind(lab: Lab, *clients: Client, **settings: int) -> TrainLoop:
    """A worker that takes over what another has left."""
    first = lab.worker(**settings)
    for client in clients:
        client.train(1)
    lab.work(first)
    lab.write_snapshots(first)
    lab.kill(first)
    return lab.worker(**settings)


def work_hard(lab: Lab, loop: TrainLoop) -> None:
    """As many turns as a run has tries; the loop sleeps after a turn in which it could do nothing."""
    for _ in range(MAX_CRASHES + 1):
        lab.work(loop)


def damage(lab: Lab, client: Client, how: str) -> dict[str, bytes]:
    """Harm the run's recovery snapshot; returns the files as they were."""
    folder = snapshot_folder(client.row.recovery_snapshot_id or "")
    files = {key: lab.blobs.get(key) for key in lab.blobs.list(folder)}
    if how == "gone":
        lab.blobs.delete(folder)
    elif how == "forgotten":
        with lab.database.write() as session:
            session.execute(delete(Snapshot).where(Snapshot.model_id == client.model_id))
    else:
        key = f"{folder}/adapter_model.safetensors"
        lab.blobs.put(key, files[key][:-1] + bytes([files[key][-1] ^ 1]))
    return files


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("gone", "the checkpoint's files are not there any more"),
        ("damaged", "the checkpoint's adapter_model.safetensors is damaged"),
    ],
)
def test_with_a_damaged_snapshot_all_that_waits_fails_with_the_reason(each_lab: Lab, how: str, why: str) -> None:
    lab = each_lab
    broken, healthy = lab.client(rank=2), lab.client(rank=3)
    second = left_behind(lab, broken, healthy, **OFTEN)
    files = damage(lab, broken, how)
    waiting = [broken.forward_backward(2), broken.optim_step(), broken.save("last")]
    healthy.train(2)
    work_hard(lab, second)
    for number in waiting:
        category, error = broken.error(number)
        assert category == "server"
        assert f"the run's state cannot be rebuilt: its recovery snapshot cannot be used ({why})" in error
        assert "go on from a saved checkpoint in a new run" in error
    assert residents(second) == {healthy.model_id}
    assert broken.row.worker_id is None
    assert_close(state_of(second, healthy), healthy.alone)
    for key, data in files.items():
        lab.blobs.put(key, data)
    good, step = broken.train(3)
    work_hard(lab, second)
    assert [broken.operation(number).state for number in (good, step)] == [DONE, DONE]


def test_a_snapshot_whose_row_is_gone_is_told_too(lab: Lab) -> None:
    client = lab.client()
    second = left_behind(lab, client, **OFTEN)
    damage(lab, client, "forgotten")
    number = client.forward_backward(2)
    work_hard(lab, second)
    category, error = client.error(number)
    assert category == "server" and "its recovery snapshot is not there any more" in error


def test_a_store_that_is_away_is_waited_for(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    client = lab.client()
    second = left_behind(lab, client, **OFTEN)
    _, step = client.train(2)
    with monkeypatch.context() as patch:

        def away(*_: object) -> bytes:
            raise StorageUnavailable("it cannot be reached")

        patch.setattr(LocalBlobStore, "get", away)
        for _ in range(3):
            work_hard(lab, second)
    assert client.operation(step).state == ACCEPTED and client.row.crash_count <= 1
    lab.work(second)
    assert_close(state_of(second, client), client.alone)


def test_of_a_run_that_cannot_be_repeated_one_operation_fails_at_a_time(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = lab.client()
    second = left_behind(lab, client, **NEVER)
    first, step = client.forward_backward(2), client.optim_step()
    with monkeypatch.context() as patch:

        def broken(*_: object) -> object:
            raise RuntimeError("CUDA error")

        patch.setattr(recovery.Executor, "_work", broken)
        for _ in range(10):
            lab.work(second)
            if client.operation(first).state != ACCEPTED:
                break
    assert client.operation(first).state == FAILED and client.operation(step).state == ACCEPTED
    assert "an earlier operation cannot be repeated (CannotReplay" in client.error(first)[1]
    lab.work(second)
    assert client.operation(step).state == FAILED  # every forward_backward before it has failed
    assert client.error(step)[0] == "user"
    client.train(3)
    lab.work(second)
    assert client.row.applied_seq == client.next_seq - 1


def test_failed_recoveries_are_counted_and_logged(lab: Lab) -> None:
    def counted() -> float:
        return metrics.REGISTRY.get_sample_value("tinworks_failed_recoveries_total", {"why": "lasting"}) or 0.0

    client, before = lab.client(), counted()
    second = left_behind(lab, client, **OFTEN)
    damage(lab, client, "gone")
    client.forward_backward(2)
    with capture_logs() as logs:
        work_hard(lab, second)
    assert 0 < counted() - before <= MAX_CRASHES
    (told,) = [entry for entry in logs if entry["event"] == "operations_given_up"]
    assert told["model_id"] == client.model_id and told["count"] == 1
