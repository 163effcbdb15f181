"""Every change of a lease, and every recovery, is an event in the log and a number in the metrics."""

from __future__ import annotations

from typing import Any

import pytest

from app.runs.log import DONE
from tests.unit.workers.train.train_lab import Client, Lab, break_passes
from workers import metrics


def counted(name: str, **labels: str) -> float:
    return metrics.REGISTRY.get_sample_value(f"tinworks_{name}", labels) or 0.0


def events(lab: Lab, client: Client) -> list[tuple[Any, ...]]:
    """Name, worker and epoch of what was logged about the run's lease, in order."""
    return [
        (entry["event"], entry["worker_id"], entry["epoch"])
        for entry in lab.logs
        if entry["event"].startswith("lease_") and entry.get("model_id") == client.model_id
    ]


def test_a_lease_that_is_taken_lost_and_given_back_is_told(lab: Lab) -> None:
    changes = ("taken", "lost", "released")
    before = [counted("leases_total", change=change) for change in changes]
    first, second, client = lab.worker(), lab.worker(), lab.client()
    client.train(1)
    lab.work(first)
    epoch = client.row.epoch
    lab.expire(first)
    client.train(2)
    lab.work(second)
    client.train(3)
    lab.work(first)  # it does not know yet
    second.hand_over()
    a, b = first._worker_id, second._worker_id
    assert events(lab, client) == [
        ("lease_taken", a, epoch),
        ("lease_taken", b, epoch + 1),
        ("lease_lost", a, epoch),
        ("lease_released", b, epoch + 1),
    ]
    gained = [counted("leases_total", change=change) - was for change, was in zip(changes, before, strict=True)]
    assert gained == [2, 1, 1]
    (taken,) = [e for e in lab.logs if e["event"] == "lease_taken" and e["worker_id"] == b]
    assert taken["crashes"] == 1


def test_a_pass_that_fails_is_told_as_a_crash_of_its_lease(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    before = counted("leases_total", change="crashed")
    loop, client = lab.worker(), lab.client()
    lab.work(loop)
    client.forward_backward(1)
    with monkeypatch.context() as patch:
        break_passes(patch, client, RuntimeError("CUDA error"))
        loop.cycle()
    assert events(lab, client)[-1][0] == "lease_crashed"
    assert counted("leases_total", change="crashed") == before + 1
    lab.work(loop)


def test_a_recovery_tells_what_it_has_replayed_and_how_long_that_took(lab: Lab) -> None:
    names = ("replayed_operations_total", "replayed_seconds_total", "recovery_seconds_count")
    first, second, client = lab.worker(), lab.worker(), lab.client()
    client.train(1)
    lab.work(first)
    before = [counted(name) for name in names]
    lab.kill(first)
    _, step = client.train(2)
    lab.work(second)
    assert client.operation(step).state == DONE
    gained = [counted(name) - was for name, was in zip(names, before, strict=True)]
    assert gained[0] == 3 and gained[1] > 0 and gained[2] == 1
    (told,) = [entry for entry in lab.logs if entry["event"] == "run_restored"]
    assert (told["model_id"], told["seq_id"], told["replayed"]) == (client.model_id, 2, 3)
    assert told["replay_s"] >= 0


def test_the_lag_of_snapshots_grows_with_the_log_and_ends_with_a_snapshot(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    lab.work(loop)
    before = loop.snapshot_lag()
    client.train(1)
    lab.work(loop)
    lag = loop.snapshot_lag()
    assert lag.operations == before.operations + 2
    assert lag.body_bytes > before.body_bytes and lag.seconds > before.seconds
    loop._writer.write_now(loop._slots[client.model_id])
    after = loop.snapshot_lag()
    assert (after.operations, after.body_bytes, after.seconds) == (0, 0, 0)
