"""The train loop turned by hand, on both databases: what clients get, and what their runs become."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from redis.exceptions import ConnectionError as RedisConnectionError
from sqlalchemy import select
from sqlalchemy.exc import OperationalError

from app.checkpoints.models import Snapshot
from app.runs import log
from app.runs.log import ACCEPTED, DONE, FAILED
from app.wire import tinker_pb2 as pb
from tests.unit.workers.train.train_lab import (
    Client,
    Lab,
    assert_close,
    fail_once,
    random_data,
    residents,
    slot_of,
    state_of,
)
from workers.model import engine
from workers.model.forward import run_pass
from workers.train import snapshots
from workers.train.loop import TrainLoop


def test_a_pipelined_script_gives_what_torch_gives(each_lab: Lab) -> None:
    loop, client = each_lab.worker(), each_lab.client()
    seqs = [seq for data in (1, 2, 3) for seq in client.train(data)]
    each_lab.work(loop)
    assert_close(state_of(loop, client), client.alone)
    assert client.row.applied_seq == seqs[-1]
    assert client.result(0) == {"model_id": client.model_id, "type": "create_model"}
    assert all(client.operation(seq).state == DONE for seq in seqs)
    assert each_lab.notices() == {f"{client.model_id}:{seq}" for seq in [0, *seqs]}


def test_a_step_reports_norms_tokens_and_learning_rate(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    lab.work(loop)
    before = state_of(loop, client)
    first, second, step = client.forward_backward(1), client.forward_backward(2), client.optim_step()
    assert loop.cycle()
    after, metrics = state_of(loop, client), client.metrics(step)
    assert metrics["tokens"] == 28 and "failed_operations" not in metrics
    assert metrics["learning_rate"] == 2e-3
    assert metrics["update_norm"] == pytest.approx(float((after.flat - before.flat).norm()), rel=1e-5)
    assert metrics["weight_norm"] == pytest.approx(float(after.flat.norm()), rel=1e-5)
    assert metrics["grad_norm"] > 0
    for seq in (first, second):
        assert [len(record.fields["logprobs"].data) // 4 for record in client.output(seq).loss_fn_outputs] == [14]


def test_runs_of_different_rank_in_one_cycle_are_each_as_alone(lab: Lab) -> None:
    loop = lab.worker()
    clients = [lab.client(rank=rank, seed=rank) for rank in (1, 3, 8)]
    lab.work(loop)
    for data in (1, 2, 3):
        for client in clients:
            client.train(10 * client.rank + data)
        assert loop.cycle()
        assert not loop.cycle()
    for client in clients:
        assert_close(state_of(loop, client), client.alone)


def test_position_and_results_are_committed_together_or_not_at_all(
    each_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, client = each_lab.worker(), each_lab.client()
    each_lab.work(loop)
    seqs = client.train(1)
    each_lab.notices()
    fail_once(monkeypatch, "finish")
    with pytest.raises(OperationalError):
        loop.cycle()
    assert client.row.applied_seq == 0
    assert [client.operation(seq).state for seq in seqs] == [ACCEPTED, ACCEPTED]
    assert each_lab.notices() == set()


def test_forward_changes_nothing_and_answers(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.train(1)
    lab.work(loop)
    before = state_of(loop, client)
    seq = client.send(random_data(5), forward_only=True)
    lab.work(loop)
    assert client.output(seq).metrics["loss:sum"] != 0
    assert state_of(loop, client).same_bits(before)


# -- what fails


def test_a_failed_forward_backward_is_counted_and_the_others_make_the_step(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    good, bad, step = client.forward_backward(1), client.bad_forward_backward(), client.optim_step()
    lab.work(loop)
    assert client.operation(good).state == DONE
    assert client.error(bad)[0] == "user"
    assert client.metrics(step)["failed_operations"] == 1
    assert_close(state_of(loop, client), client.alone)


def test_a_step_after_nothing_but_failures_fails_and_names_them(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.train(1)
    lab.work(loop)
    before = state_of(loop, client)
    failed = [client.bad_forward_backward(), client.bad_forward_backward()]
    step = client.optim_step(note=False)
    lab.work(loop)
    category, error = client.error(step)
    assert category == "user"
    assert f"seq_id {failed[0]}, {failed[1]}" in error
    assert state_of(loop, client).same_bits(before)
    client.train(2)
    lab.work(loop)
    assert_close(state_of(loop, client), client.alone)


def test_a_step_without_a_gradient_changes_nothing(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.train(1)
    lab.work(loop)
    before = state_of(loop, client)
    step = client.optim_step(note=False)
    lab.work(loop)
    metrics = client.metrics(step)
    assert (metrics["grad_norm"], metrics["update_norm"], metrics["tokens"]) == (0, 0, 0)
    assert state_of(loop, client).same_bits(before)


def test_a_gradient_that_is_not_finite_is_refused_and_cleared(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.train(1)
    lab.work(loop)
    before = state_of(loop, client)
    nan, step = client.nan_forward_backward(), client.optim_step(note=False)
    lab.work(loop)
    assert np.isnan(client.output(nan).metrics["loss:sum"])
    category, error = client.error(step)
    assert category == "user" and "not finite" in error
    assert state_of(loop, client).same_bits(before)
    client.train(2)
    lab.work(loop)
    assert_close(state_of(loop, client), client.alone)


def test_a_step_that_failed_on_arrival_leaves_the_gradient_for_the_next(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.forward_backward(1)
    bad = client.optim_step(note=False, learning_rate=-1.0)
    step = client.optim_step()
    lab.work(loop)
    assert client.error(bad)[0] == "user"
    assert client.metrics(step)["grad_norm"] > 0
    assert_close(state_of(loop, client), client.alone)


def test_a_neighbours_failures_are_its_own(lab: Lab) -> None:
    loop, sick, healthy = lab.worker(), lab.client(rank=2), lab.client(rank=3)
    lab.work(loop)
    healthy.train(1)
    sick.nan_forward_backward()
    sick.bad_forward_backward()
    sick.optim_step(note=False)
    assert loop.cycle()
    assert_close(state_of(loop, healthy), healthy.alone)


# -- order


def test_operations_that_arrive_out_of_order_take_effect_in_order(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    lab.work(loop)
    client.forward_backward(2, seq_id=2)
    assert not loop.cycle()
    client.optim_step(seq_id=3)
    assert not loop.cycle()
    assert client.row.applied_seq == 0
    client.forward_backward(1, seq_id=1)
    lab.work(loop)
    client.script = [("fb", 1), ("fb", 2), ("step", 0)]
    assert client.row.applied_seq == 3
    assert_close(state_of(loop, client), client.alone)


def test_a_repeated_request_takes_effect_once(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    first, step = client.train(1)
    client.forward_backward(1, seq_id=first)
    lab.work(loop)
    client.forward_backward(1, seq_id=first)
    client.optim_step(seq_id=step)
    assert not loop.cycle()
    assert_close(state_of(loop, client), client.alone)


def test_a_gap_that_was_given_up_is_consumed_as_a_failure(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.forward_backward(1)
    missing = client._seq(None)
    step = client.optim_step()
    lab.work(loop)
    with lab.database.write() as session:
        log.fill_gaps(session, older_than=timedelta(0))
    lab.work(loop)
    assert client.error(missing)[0] == "user"
    assert client.metrics(step)["failed_operations"] == 1
    assert_close(state_of(loop, client), client.alone)


# -- a commit that fails


@pytest.mark.parametrize("place", ["finish", "advance"])
def test_after_a_commit_that_failed_everything_takes_effect_once(
    each_lab: Lab, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    loop = each_lab.worker()
    clients = [each_lab.client(rank=rank) for rank in (2, 3)]
    for client in clients:
        client.train(1)
    each_lab.work(loop)
    for client in clients:
        client.train(2)
    fail_once(monkeypatch, place)
    with pytest.raises(OperationalError):
        loop.cycle()
    assert residents(loop) == set()
    each_lab.work(loop)
    for client in clients:
        assert client.row.applied_seq == 4
        assert client.row.crash_count == 0
        assert_close(state_of(loop, client), client.alone)


def test_a_save_whose_commit_failed_is_listed_once(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, client = lab.worker(), lab.client()
    lab.work(loop)
    save = client.save("one")
    assert loop.cycle()
    lab.write_files(loop)
    fail_once(monkeypatch, "finish")
    with pytest.raises(OperationalError):
        loop.cycle()
    lab.work(loop)
    assert client.result(save)["path"] == f"tinker://{client.model_id}/weights/one"
    assert lab.snapshot_of(client, "weights", "one")


def test_a_notice_that_is_lost_loses_nothing_else(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, client = lab.worker(), lab.client()

    def away(*_: object) -> None:
        raise RedisConnectionError("away")

    monkeypatch.setattr(lab.redis, "publish", away)
    _, step = client.train(1)
    lab.work(loop)
    assert client.operation(step).state == DONE
    assert slot_of(loop, client).applied_seq == step


# -- fencing


def overtaken(lab: Lab, monkeypatch: pytest.MonkeyPatch, first: TrainLoop, second: TrainLoop, client: Client) -> None:
    """While the first worker's next pass computes, its lease of the client's run runs out and the second takes it."""
    calls: list[int] = []

    def slow(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            lab.expire(first, client)
            lab.work(second)
        return run_pass(*args, **options)

    monkeypatch.setattr(engine, "run_pass", slow)


def test_a_worker_that_was_overtaken_commits_nothing_of_that_run_but_the_others(
    each_lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = each_lab.worker(), each_lab.worker()
    lost, kept = each_lab.client(rank=2), each_lab.client(rank=3)
    each_lab.work(first)
    (lost_fb, lost_step), (_, kept_step) = lost.train(1), kept.train(1)
    overtaken(each_lab, monkeypatch, first, second, lost)
    assert first.cycle()
    assert residents(first) == {kept.model_id}
    assert residents(second) == {lost.model_id}
    assert (lost.row.worker_id, lost.row.applied_seq) == (second._worker_id, lost_step)
    assert kept.operation(kept_step).state == DONE
    assert lost.operation(lost_fb).state == DONE
    for client, loop in ((lost, second), (kept, first)):
        client.train(2)
        each_lab.work(loop)
        assert_close(state_of(loop, client), client.alone)


def test_an_overtaken_save_names_no_checkpoint(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, client = lab.worker(), lab.worker(), lab.client()
    lab.work(first)
    save = client.save("mine")
    write, calls = snapshots.write, []

    def slow(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            lab.expire(first, client)
            lab.work(second)
        write(*args)

    monkeypatch.setattr(snapshots, "write", slow)
    lab.work(first)
    assert len(calls) == 2 and not residents(first)
    named = lab.snapshot_of(client, "weights", "mine")
    with lab.database.read() as session:
        rows = session.scalars(select(Snapshot.id).where(Snapshot.model_id == client.model_id)).all()
    assert rows == [named]
    assert client.operation(save).state == DONE


def test_a_run_that_another_worker_had_meanwhile_is_taken_anew(each_lab: Lab) -> None:
    first, second, client = each_lab.worker(), each_lab.worker(), each_lab.client()
    client.train(1)
    each_lab.work(first)
    each_lab.expire(first)
    client.train(2)
    each_lab.work(second)
    second._residents.evict(slot_of(second, client))
    _, step = client.train(3)
    first.cycle()
    each_lab.work(first)
    assert client.operation(step).state == DONE
    assert_close(state_of(first, client), client.alone)


def test_an_expired_lease_that_nobody_took_still_counts(lab: Lab) -> None:
    loop, client = lab.worker(lease_s=0.001), lab.client()
    client.train(1)
    lab.work(loop)
    lab.expire(loop)
    client.train(2)
    lab.work(loop)
    assert client.row.epoch == 1
    assert_close(state_of(loop, client), client.alone)


def test_a_failed_creation_answers_all_that_comes_after(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, client = lab.worker(), lab.client()
    forward, step = client.train(1)

    def broken(config: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(lab.base, "new_adapter", broken)
    lab.work(loop)
    assert client.error(0)[0] == "server"
    assert client.row.failed
    assert [client.operation(seq).state for seq in (forward, step)] == [FAILED, FAILED]
    assert client.error(step)[0] == "user"


def test_results_over_the_inline_limit_are_blobs(lab: Lab) -> None:
    loop, client = lab.worker(inline_bytes=16), lab.client()
    forward, _ = client.train(1)
    lab.work(loop)
    row = client.operation(forward)
    assert row.result is None and row.result_blob is not None
    assert pb.ForwardBackwardOutput.FromString(lab.blobs.get(row.result_blob)).metrics["loss:sum"]
    assert torch.isfinite(state_of(loop, client).flat).all()
