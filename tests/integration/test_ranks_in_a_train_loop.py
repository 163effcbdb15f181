"""Runs on four ranks behave as on one, and move between workers of one rank and of several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.ranks import ranks
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, slot_of, state_of, tiny_base
from workers.model.ranks.leader import ShardedEngine
from workers.train.loop import TrainLoop


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShardedEngine]:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_base().model.save_pretrained(folder)
    with ranks(4, folder) as engine:
        yield engine


def move(lab: Lab, client: Client, old: TrainLoop, new: TrainLoop) -> None:
    """The run leaves one worker, its state in a snapshot alone, and comes to the other."""
    old._residents.evict(slot_of(old, client))
    lab.restore(new, client)
    assert slot_of(new, client).lag.operations == 0


def test_a_pipelined_script_gives_what_torch_gives(lab: Lab, four: ShardedEngine) -> None:
    loop = lab.worker(four)
    clients = [lab.client(rank=rank, seed=rank) for rank in (1, 4, 6)]
    for data in (1, 2, 3):
        for client in clients:
            client.forward_backward(10 * data + client.rank)
            client.train(data)
    lab.work(loop)
    for client in clients:
        assert_close(state_of(loop, client), client.alone)


@pytest.mark.parametrize("to_ranks", [True, False])
def test_a_pending_gradient_moves_between_one_rank_and_four(lab: Lab, four: ShardedEngine, to_ranks: bool) -> None:
    many, one, client = lab.worker(four), lab.worker(), lab.client()
    old, new = (one, many) if to_ranks else (many, one)
    lab.work(old)
    client.train(1)
    for data in (2, 3):
        client.forward_backward(data)
    lab.work(old)
    move(lab, client, old, new)
    assert_close(state_of(new, client), client.alone)
    client.train(4)
    lab.work(new)
    assert_close(state_of(new, client), client.alone)


def test_a_checkpoint_holds_the_gradients_of_all_ranks(lab: Lab, four: ShardedEngine) -> None:
    many, client = lab.worker(four), lab.client()
    client.train(1)
    client.forward_backward(2)
    path = client.save("half")
    lab.work(many)
    assert client.result(path)["path"].endswith("weights/half")
    other = lab.client_from(client.result(path)["path"], owner_id=client.owner_id, optimizer=True)
    lab.work(many)
    assert_close(state_of(many, other), client.alone)


def test_a_run_is_rebuilt_from_its_log(lab: Lab, four: ShardedEngine) -> None:
    many, one, client = lab.worker(four), lab.worker(), lab.client()
    lab.work(many)
    client.train(1)
    client.forward_backward(2)
    lab.work(many)
    lab.kill(many)
    client.optim_step()
    lab.work(one)
    assert_close(state_of(one, client), client.alone)


def test_a_refused_step_takes_the_gradients_of_all_ranks_with_it(lab: Lab, four: ShardedEngine) -> None:
    loop, client = lab.worker(four), lab.client()
    lab.work(loop)
    client.nan_forward_backward()
    refused = client.optim_step(note=False)
    client.bad_forward_backward()
    client.forward_backward(2)
    taken = client.optim_step()
    lab.work(loop)
    assert client.operation(refused).state == "failed"
    assert client.metrics(taken)["failed_operations"] == 1
    assert_close(state_of(loop, client), client.alone)
