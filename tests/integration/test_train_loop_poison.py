"""Operations that bring a pass or a whole worker down: they are given up, and nobody else pays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from sqlalchemy.exc import DataError
from sqlalchemy.orm import Session

from app.runs import log
from app.runs.log import ACCEPTED, DONE, Finished, Ready
from app.wire.types import LoraConfig
from tests.unit.workers.train.train_lab import (
    Client,
    Killed,
    Lab,
    assert_close,
    break_passes,
    random_data,
    residents,
    state_of,
)
from workers.model.lora import Adapter
from workers.train.lease import Lease
from workers.train.loop import TrainLoop
from workers.train.planner import MAX_CRASHES
from workers.train.recovery import restore


def crashes(client: Client) -> int:
    row = client.row
    return row.crash_count if row.crash_seq == row.applied_seq else 0


def test_a_pass_that_fails_as_a_whole_is_given_up_at_the_third_time(
    each_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, sick, healthy = each_lab.worker(), each_lab.client(rank=2), each_lab.client(rank=3)
    each_lab.work(loop)
    bad = sick.send(random_data(1))
    last = sick.optim_step(note=False)
    healthy.train(1)
    with monkeypatch.context() as patch:
        raised = break_passes(patch, sick, RuntimeError("CUDA error"))
        assert loop.cycle()
        assert crashes(sick) == crashes(healthy) == 1
        assert residents(loop) == set()
        each_lab.work(loop)
    assert raised == [2, 1, 1]
    assert sick.error(bad)[0] == "server"
    category, error = sick.error(last)
    assert category == "user" and f"seq_id {bad}" in error
    assert_close(state_of(loop, healthy), healthy.alone)
    assert crashes(healthy) == 0
    for client in (sick, healthy):
        client.train(5)
    each_lab.work(loop)
    for client in (sick, healthy):
        assert_close(state_of(loop, client), client.alone)


def test_a_suspect_is_run_alone_while_others_go_on_together(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sick = lab.worker(), lab.client(rank=2)
    others = [lab.client(rank=rank) for rank in (3, 4)]
    lab.work(loop)
    sick.forward_backward(1)
    with monkeypatch.context() as patch:
        break_passes(patch, sick, RuntimeError("once"))
        loop.cycle()
    for client in others:
        client.train(1)
    sick.optim_step()
    lab.work(loop)
    assert crashes(sick) == 0
    for client in (sick, *others):
        assert_close(state_of(loop, client), client.alone)


def die(lab: Lab, loop: TrainLoop) -> None:
    """The worker dies in its next pass with the sick run."""
    with pytest.raises(Killed):
        for _ in range(10):
            loop.cycle()
    lab.kill(loop)


def test_deaths_of_workers_are_counted_the_same_way(each_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = each_lab
    first, sick, healthy = lab.worker(snapshot_operations=2), lab.client(rank=2), lab.client(rank=3)
    sick.train(1)
    healthy.train(1)
    lab.work(first)
    lab.write_snapshots(first)
    bad = sick.send(random_data(1))
    good, step = sick.forward_backward(2), sick.optim_step()
    _, healthy_step = healthy.train(2)
    with monkeypatch.context() as patch:
        raised = break_passes(patch, sick, Killed())
        die(lab, first)
        for _ in range(2):
            die(lab, lab.worker())
        assert sick.operation(bad).state == ACCEPTED
        patch.undo()
        fourth = lab.worker()
        lab.work(fourth)
    assert healthy.operation(healthy_step).state == DONE
    assert raised == [3, 1, 1]
    assert sick.error(bad)[0] == "server"
    assert sick.operation(good).state == DONE
    assert sick.metrics(step)["failed_operations"] == 1
    for client in (sick, healthy):
        client.train(3)
    lab.work(fourth)
    for client in (sick, healthy):
        assert_close(state_of(fourth, client), client.alone)


@pytest.mark.parametrize("kind", ["forward_backward", "optim_step", "save"])
def test_after_a_death_the_run_is_what_it_was_when_its_operation_was_given_up(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    first, client = lab.worker(), lab.client(rank=2)
    client.forward_backward(1)
    lab.work(first)
    bad = {"forward_backward": lambda: client.send(random_data(9)), "save": lambda: client.save("bad")}.get(
        kind, lambda: client.optim_step(note=False)
    )()
    for _ in range(3):
        with monkeypatch.context() as patch:
            for name in ("forward", "step", "control"):
                patch.setattr(f"workers.train.execute.Executor.{name}", broken)
            assert first.cycle()
        lab.restore(first, client)
    lab.work(first)
    assert client.error(bad)[0] == "server"
    live = state_of(first, client)
    lab.kill(first)
    second = lab.worker()
    lab.restore(second, client)
    assert state_of(second, client).same_bits(live)


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("CUDA error")


def test_a_creation_that_is_given_up_fails_the_run(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, client, other = lab.worker(), lab.client(rank=2), lab.client(rank=3)
    _, step = client.train(1)
    real = lab.base.new_adapter

    def breaking(config: LoraConfig) -> Adapter:
        if config.rank == client.rank:
            raise Killed
        return real(config)

    with monkeypatch.context() as patch:
        patch.setattr(lab.base, "new_adapter", breaking)
        for _ in range(3):
            die(lab, lab.worker())
    other.train(1)
    lab.work(loop)
    assert client.error(0)[0] == "server"
    assert client.row.failed
    assert client.error(step)[0] == "user"
    assert_close(state_of(loop, other), other.alone)


def test_a_body_that_is_lost_stops_no_other_run(lab: Lab) -> None:
    lab.settings.inline_bytes = 64
    loop, sick, healthy = lab.worker(), lab.client(rank=2), lab.client(rank=3)
    lab.work(loop)
    bad = sick.send(random_data(1))
    blob = sick.operation(bad).body_blob
    assert blob is not None
    lab.blobs.delete(blob)
    healthy.train(1)
    lab.work(loop)
    assert sick.error(bad)[0] == "server"
    assert_close(state_of(loop, healthy), healthy.alone)
    sick.train(2)
    lab.work(loop)
    assert_close(state_of(loop, sick), sick.alone)


def test_deaths_at_one_operation_are_not_counted_to_the_others_that_wait(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, sick = lab.worker(), lab.client(rank=2)
    others = [lab.client(rank=rank) for rank in (3, 4, 5)]
    lab.work(first)
    with monkeypatch.context() as patch:
        break_passes(patch, sick, Killed())
        bad = sick.send(random_data(1))
        for client in others:
            client.train(1)
        die(lab, first)
        for _ in range(2):
            die(lab, lab.worker())
            assert all(crashes(client) <= 1 for client in others)
    loop = lab.worker()
    lab.work(loop)
    assert sick.error(bad)[0] == "server"
    for client in others:
        client.train(2)
    lab.work(loop)
    for client in others:
        assert_close(state_of(loop, client), client.alone)


def test_a_suspect_that_waits_for_a_missing_request_keeps_no_other_waiting(lab: Lab) -> None:
    first, waiting, ready = lab.worker(), lab.client(rank=2), lab.client(rank=3)
    lab.work(first)
    waiting.forward_backward(2, seq_id=2)
    ready.train(1)
    lab.kill(first)
    second = lab.worker()
    lab.work(second)
    assert ready.row.applied_seq == 2
    waiting.forward_backward(1, seq_id=1)
    lab.work(second)
    assert waiting.row.applied_seq == 2


def test_results_that_the_database_never_takes_harm_nobody_else(each_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, sick, healthy = each_lab.worker(), each_lab.client(rank=2), each_lab.client(rank=3)
    each_lab.work(loop)
    bad, good, step = sick.send(random_data(1)), sick.forward_backward(2), sick.optim_step()
    _, healthy_step = healthy.train(1)
    real = log.finish

    def refuse(session: Session, outcomes: Sequence[Finished]) -> None:
        if any((one.model_id, one.seq_id) == (sick.model_id, bad) and one.result for one in outcomes):
            raise DataError("UPDATE", {}, Exception("a NUL byte"))
        real(session, outcomes)

    monkeypatch.setattr(log, "finish", refuse)
    assert loop.cycle()
    assert healthy.operation(healthy_step).state == DONE and crashes(healthy) == 0
    assert crashes(sick) == 1
    each_lab.work(loop)
    assert sick.error(bad)[0] == "server"
    assert sick.operation(good).state == DONE and sick.metrics(step)["failed_operations"] == 1
    for client in (sick, healthy):
        assert_close(state_of(loop, client), client.alone)


# -- all runs of a dead worker come back at once


def test_all_runs_of_a_dead_worker_come_back_together_and_are_tried_one_by_one(
    each_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = each_lab
    first, clients = lab.worker(), [lab.client(rank=rank, seed=rank) for rank in (2, 3, 4, 5)]
    lab.work(first)
    for client in clients:
        client.train(1)
    lab.kill(first)
    second = lab.worker()
    assert second.cycle()
    assert residents(second) == {client.model_id for client in clients}
    tried = [client for client in clients if client.row.tried_seq is not None]
    assert len(tried) == 1 and tried[0].row.applied_seq == 1
    assert [crashes(client) for client in clients if client is not tried[0]] == [1, 1, 1]
    lab.work(second)
    for client in clients:
        assert client.row.applied_seq == 2 and crashes(client) == 0
        assert_close(state_of(second, client), client.alone)


def test_a_death_counts_against_the_one_that_was_tried(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first, sick = lab.worker(), lab.client(rank=2)
    others = [lab.client(rank=rank) for rank in (3, 4, 5)]
    for client in (sick, *others):
        client.train(1)
    lab.work(first)
    for slot in first._slots.values():
        first._writer.write_now(slot)
    bad = sick.send(random_data(1))
    for client in others:
        client.train(2)
    with monkeypatch.context() as patch:
        break_passes(patch, sick, Killed())
        die(lab, first)
        most = [0] * len(others)
        for _ in range(MAX_CRASHES - 1):
            die(lab, lab.worker())
            most = [max(m, crashes(client)) for m, client in zip(most, others, strict=True)]
    assert max(most) <= 1
    last = lab.worker()
    lab.work(last)
    assert sick.error(bad)[0] == "server"
    for client in others:
        assert client.row.applied_seq == 4
        if client.model_id not in residents(last):
            lab.restore(last, client)
        assert_close(state_of(last, client), client.alone)


def test_a_body_that_kills_whoever_reads_it_is_given_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first, sick, healthy = lab.worker(), lab.client(rank=2), lab.client(rank=3)
    lab.work(first)
    bad = sick.send(random_data(1))
    _, step = healthy.train(1)
    real = log.load_bodies

    def reading(session: Session, blobs: Any, operations: Iterable[Ready]) -> Any:
        wanted = list(operations)
        if (sick.model_id, bad) in {(one.model_id, one.seq_id) for one in wanted}:
            raise Killed
        return real(session, blobs, wanted)

    with monkeypatch.context() as patch:
        patch.setattr(log, "load_bodies", reading)
        die(lab, first)
        for _ in range(MAX_CRASHES - 1):
            die(lab, lab.worker())
        last = lab.worker()
        lab.work(last)
    assert sick.error(bad)[0] == "server"
    assert healthy.operation(step).state == DONE


# -- a restore that takes its worker with it


def break_restores(patch: pytest.MonkeyPatch, sick: Client) -> list[set[str]]:
    """The worker dies of a restore of this run. Returns which runs it was to restore, each time."""
    asked: list[set[str]] = []

    def restoring(granted: Sequence[Lease], *args: Any, **options: Any) -> Any:
        asked.append({one.run.id for one in granted})
        if sick.model_id in asked[-1]:
            raise Killed
        return restore(granted, *args, **options)

    patch.setattr("workers.train.residency.restore", restoring)
    return asked


def test_a_restore_that_kills_its_workers_is_given_up_without_another_try(
    each_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = each_lab
    first, sick, healthy = lab.worker(), lab.client(rank=2), lab.client(rank=3)
    for client in (sick, healthy):
        client.train(1)
    lab.work(first)
    lab.kill(first)
    waiting = [sick.forward_backward(2), sick.optim_step()]
    healthy.train(2)
    with monkeypatch.context() as patch:
        asked = break_restores(patch, sick)
        for _ in range(MAX_CRASHES):
            die(lab, lab.worker())
        last = lab.worker()
        for _ in range(3):  # a loop sleeps after a turn in which it could do nothing
            lab.work(last)
        assert [len(some) for some in asked if sick.model_id in some] == [2, 1, 1]
        for number in waiting:
            category, error = sick.error(number)
            assert category == "server"
            assert "the run's state cannot be rebuilt: each worker that tried has ended with it" in error
        assert sick.row.worker_id is None and healthy.row.applied_seq == 4
        if healthy.model_id not in residents(last):
            lab.restore(last, healthy)
        assert_close(state_of(last, healthy), healthy.alone)
        later = sick.optim_step()
        for loop in (last, lab.worker()):  # it is tried twice more
            die(lab, loop)
        lab.work(lab.worker())
        assert sick.error(later)[0] == "server"
    good = sick.forward_backward(3)
    lab.work(lab.worker())
    assert sick.output(good)


def test_a_run_that_has_no_room_beside_others_waits_until_there_is_some(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.train.residency._NO_MEMORY_S", 0.0)
    first, large = lab.worker(), lab.client(rank=2)
    large.train(1)
    lab.work(first)
    lab.kill(first)
    second, others = lab.worker(), [lab.client(rank=rank) for rank in (3, 4)]
    for client in others:
        client.train(1)
    lab.work(second)
    _, step = large.train(2)

    def tight(granted: Sequence[Lease], *args: Any, **options: Any) -> Any:
        if second._slots and large.model_id in {one.run.id for one in granted}:
            error = RuntimeError("operation 1: the worker has no memory left")
            error.__cause__ = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return {large.model_id: error}
        return restore(granted, *args, **options)

    monkeypatch.setattr("workers.train.residency.restore", tight)
    for _ in range(6):
        lab.work(second)
        assert crashes(large) <= 1
    assert large.operation(step).state == DONE
    assert residents(second) == {large.model_id}
    for client in others:
        client.optim_step()
        assert client.row.worker_id is None


def test_a_run_that_has_no_room_though_it_is_alone_fails(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first, large = lab.worker(), lab.client(rank=2)
    large.train(1)
    lab.work(first)
    first.hand_over()
    step = large.optim_step()
    nothing = Mock(side_effect=lambda granted, *_, **__: {one.run.id: MemoryError() for one in granted})
    monkeypatch.setattr("workers.train.residency.restore", nothing)
    for _ in range(MAX_CRASHES + 1):
        lab.work(first)
    assert nothing.call_count == MAX_CRASHES
    assert "cannot be repeated (MemoryError" in large.error(step)[1]
