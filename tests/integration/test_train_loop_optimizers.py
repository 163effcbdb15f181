"""Runs of both optimizers in one train worker, from their creation to their recovery."""

from __future__ import annotations

import torch

from app.runs.log import DONE
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, slot_of, state_of


def train(client: Client, *seeds: int) -> None:
    for seed in seeds:
        client.train(seed)


def test_a_run_steps_with_the_optimizer_that_it_was_created_with(each_lab: Lab) -> None:
    lab = each_lab
    loop, adam, dimuon = lab.worker(), lab.client(), lab.client(optimizer="dimuon")
    train(adam, 1, 2)
    train(dimuon, 1, 2)
    lab.work(loop)
    kinds = []
    for client in (adam, dimuon):
        state = slot_of(loop, client).state
        assert state is not None
        kinds.append((state.optimizer.kind, state.optimizer.step))
    assert kinds == [("adamw", 2), ("dimuon", 2)]
    assert_close(state_of(loop, adam), adam.alone)
    assert dimuon.metrics(4).keys() == adam.metrics(4).keys()


def test_runs_of_both_kinds_share_a_step_and_no_bit(lab: Lab) -> None:
    together, apart = lab.worker(), lab.worker()
    pair = lab.client(), lab.client(optimizer="dimuon")
    for client in pair:
        train(client, 1, 2)
    lab.work(together)
    for client in pair:
        twin = lab.client(optimizer=client.optimizer)
        train(twin, 1, 2)
        lab.work(apart)
        assert_close(state_of(together, client), state_of(apart, twin))


def test_hyperparameters_of_the_other_optimizer_fail_and_take_nothing(lab: Lab) -> None:
    loop = lab.worker()
    for kind, other in (("adamw", "dimuon"), ("dimuon", "adamw")):
        client = lab.client(optimizer=kind)
        client.forward_backward(1)
        client.optimizer = other
        wrong = client.optim_step(note=False)
        client.optimizer = kind
        step = client.optim_step()
        lab.work(loop)
        sent, own = ("optimizer_params", "adam_params") if kind == "adamw" else ("adam_params", "optimizer_params")
        assert client.error(wrong) == ("user", f"{sent}: this run's optimizer is {kind}; send {own}")
        assert client.metrics(step)["update_norm"] > 0 and client.metrics(step)["tokens"] == 14


def test_a_killed_worker_costs_no_bit_of_the_momentum(lab: Lab) -> None:
    """From a snapshot in the middle of a sum, and from the log alone."""
    for operations in (3, 1000):
        first = lab.worker(snapshot_operations=operations)
        client, twin = lab.client(optimizer="dimuon"), lab.client(optimizer="dimuon")
        for each in (client, twin):
            train(each, 1, 2)
            each.forward_backward(3)
            lab.work(first)
        lab.write_snapshots(first)
        before = state_of(first, twin)
        lab.kill(first)
        second = lab.worker()
        lab.restore(second, client)
        assert (slot_of(second, client).recovery_snapshot_id is not None) == (operations == 3)
        assert state_of(second, client).same_bits(before)
        client.optim_step()
        lab.work(second)
        state = slot_of(second, client).state
        assert state is not None and state.optimizer.step == 3


def test_a_run_made_of_a_checkpoint_has_its_optimizer_or_a_fresh_one(lab: Lab) -> None:
    loop, source = lab.worker(), lab.client(optimizer="dimuon")
    train(source, 1)
    source.save("here")
    lab.work(loop)
    path = f"tinker://{source.model_id}/weights/here"
    saved = state_of(loop, source)
    dimuon = {"type": "dimuon", "version": 1}
    for optimizer, fields, kind, steps in (
        (True, {}, "dimuon", 1),
        (True, {"optimizer_config": dimuon}, "dimuon", 1),
        (False, {}, "adamw", 0),
        (False, {"optimizer_config": dimuon}, "dimuon", 0),
    ):
        client = lab.client_from(path, owner_id=source.owner_id, optimizer=optimizer, **fields)
        lab.work(loop)
        assert client.operation(0).state == DONE
        assert client.row.optimizer["type"] == kind
        state = state_of(loop, client)
        assert state.step == steps and torch.equal(state.flat, saved.flat)
        assert torch.equal(state.m, saved.m if steps else torch.zeros_like(saved.m))
        train(client, 2)
        lab.work(loop)
        assert client.metrics(2)["update_norm"] > 0


def test_a_resumed_run_goes_on_as_if_uninterrupted(lab: Lab) -> None:
    loop, source = lab.worker(), lab.client(optimizer="dimuon")
    train(source, 1, 2)
    source.save("here")
    train(source, 3, 4)
    lab.work(loop)
    resumed = lab.client_from(f"tinker://{source.model_id}/weights/here", owner_id=source.owner_id, optimizer=True)
    train(resumed, 3, 4)
    lab.work(loop)
    assert state_of(loop, resumed).same_bits(state_of(loop, source))


def test_another_optimizer_config_than_the_checkpoints_is_refused_with_its_state(lab: Lab) -> None:
    loop, source = lab.worker(), lab.client(optimizer="dimuon")
    source.save("here")
    lab.work(loop)
    path = f"tinker://{source.model_id}/weights/here"
    client = lab.client_from(path, owner_id=source.owner_id, optimizer=True, optimizer_config={"type": "adamw"})
    category, error = client.error(0)
    assert category == "user" and error.startswith("optimizer_config: the checkpoint's optimizer is dimuon, not adamw")


def test_the_state_of_another_optimizer_cannot_be_loaded_in_place_but_weights_can(lab: Lab) -> None:
    loop, source = lab.worker(), lab.client(optimizer="dimuon")
    train(source, 1)
    source.save("here")
    lab.work(loop)
    client = lab.client(owner_id=source.owner_id)
    train(client, 5)
    path = f"tinker://{source.model_id}/weights/here"
    refused, loaded = client.load(path, optimizer=True), client.load(path, optimizer=False)
    lab.work(loop)
    category, error = client.error(refused)
    assert category == "user"
    assert error.startswith("optimizer: the checkpoint's optimizer is dimuon, the run's adamw; load it with optimizer=")
    assert client.operation(loaded).state == DONE
    state = state_of(loop, client)
    assert torch.equal(state.flat, state_of(loop, source).flat) and state.step == 0
    train(client, 6)
    lab.work(loop)
    assert client.metrics(6)["update_norm"] > 0
