"""A checkpoint of one worker goes on at another, of other slots and other ranks, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from app.wire.types import LoraConfig
from tests.integration.ranks import ranks
from tests.unit.workers.train.train_lab import EPS, LR, Client, Lab, assert_close, random_data, state_of, tiny_base
from workers.model.engine import Engine
from workers.model.forward import Work, run_pass
from workers.model.ranks.leader import ShardedEngine
from workers.train.loop import TrainLoop

BEFORE = [("fb", 1), ("step", 0), ("fb", 2), ("step", 0), ("fb", 3)]
"""The last gradient has not been used when the state is saved."""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedEngine]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_base().model.save_pretrained(folder)
    with ranks(2, folder) as engine:
        yield engine


def worker(lab: Lab, engine: Engine | None, *, slots: int) -> TrainLoop:
    """A worker that leaves no run to others. `engine`: of several ranks."""
    return lab.worker(engine, train_slots=slots, claim_interval_s=0.0)


def saved(lab: Lab, loop: TrainLoop) -> tuple[Client, str]:
    """A run that was saved in the middle of a step, while neighbours of other ranks trained."""
    client, *neighbours = (lab.client(rank=rank, seed=rank) for rank in (4, 1, 7))
    for kind, data in BEFORE:
        if kind == "fb":
            client.forward_backward(data)
        else:
            client.optim_step()
        for neighbour in neighbours:
            neighbour.train(data)
    save = client.save("half")
    lab.work(loop)
    path = str(client.result(save)["path"])
    lab.kill(loop)
    return client, path


def loaded(lab: Lab, loop: TrainLoop, source: Client, path: str, *, optimizer: bool, in_place: bool) -> Client:
    """The checkpoint in a run of the worker."""
    if in_place:
        client = lab.client(rank=4, seed=99, owner_id=source.owner_id)
        client.train(50)
        client.load(path, optimizer=optimizer)
    else:
        client = lab.client_from(path, owner_id=source.owner_id, optimizer=optimizer)
        client.rank = 4
    client.seed, client.script = source.seed, list(BEFORE)
    lab.work(loop)
    return client


def with_a_fresh_optimizer(flat: Tensor, data: int) -> Tensor:
    """These weights after a step of a new AdamW, by torch."""
    base = tiny_base()
    adapter = base.new_adapter(LoraConfig(rank=4, seed=0))
    adapter.flat.copy_(flat)
    parameters = [parameter for pair in adapter.modules.values() for parameter in pair]
    optimizer = torch.optim.AdamW(parameters, lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
    run_pass(base, [Work(adapter, random_data(data), "cross_entropy")], micro_batch_tokens=4096)
    optimizer.step()
    return adapter.flat.detach()


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "a new run"])
@pytest.mark.parametrize(("saver", "loader"), [(1, 1), (1, 2), (2, 1), (2, 2)], ids=lambda count: f"{count} ranks")
def test_with_its_optimizer_it_goes_on_as_if_uninterrupted(
    lab: Lab, two: ShardedEngine, saver: int, loader: int, in_place: bool
) -> None:
    engines = {1: None, 2: two}
    source, path = saved(lab, worker(lab, engines[saver], slots=8))
    second = worker(lab, engines[loader], slots=1)
    client = loaded(lab, second, source, path, optimizer=True, in_place=in_place)
    neighbour = lab.client(rank=2)
    client.optim_step()
    neighbour.train(8)
    client.train(4)
    lab.work(second)
    neighbour.train(9)
    lab.work(second)
    client.train(5)
    lab.work(second)
    assert_close(state_of(second, client), client.alone)
    assert state_of(second, client).step == 5


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "a new run"])
@pytest.mark.parametrize(("saver", "loader"), [(1, 2), (2, 1)], ids=lambda count: f"{count} ranks")
def test_without_its_optimizer_it_begins_a_new_one_and_forgets_the_gradient(
    lab: Lab, two: ShardedEngine, saver: int, loader: int, in_place: bool
) -> None:
    engines = {1: None, 2: two}
    source, path = saved(lab, worker(lab, engines[saver], slots=8))
    second = worker(lab, engines[loader], slots=1)
    client = loaded(lab, second, source, path, optimizer=False, in_place=in_place)
    weights = source.alone.flat
    before = state_of(second, client)
    torch.testing.assert_close(before.flat, weights, atol=1e-5, rtol=0)
    assert not before.m.any() and not before.v.any() and not before.grad.any() and before.step == 0
    client.train(4)
    lab.work(second)
    expected = with_a_fresh_optimizer(before.flat, 4)
    after = state_of(second, client)
    torch.testing.assert_close(after.flat, expected, atol=1e-5, rtol=0)
    assert float((after.flat - client.alone.flat).norm()) > 1e-2, "the moments make no difference"
