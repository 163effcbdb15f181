"""Operations that do not fit into a worker's memory fail with that reason; the process and everybody else go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from app.runs.log import DONE
from tests.unit.workers.train.train_lab import Lab, assert_close, random_data, residents, state_of
from workers.model import forward

ROOM = 24
"""Tokens of a micro-batch that fit; the longest datum of an ordinary request has fewer."""


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    real = forward.batch_logprobs

    def tight(base: Any, batch: Any) -> torch.Tensor:
        if batch.input_ids.numel() > ROOM:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return real(base, batch)

    monkeypatch.setattr(forward, "batch_logprobs", tight)


@pytest.mark.usefixtures("small_machine")
def test_what_fits_in_pieces_is_done_and_what_does_not_fails_alone(each_lab: Lab) -> None:
    lab = each_lab
    loop, client, other = lab.worker(), lab.client(rank=2), lab.client(rank=3)
    lab.work(loop)
    client.forward_backward(1)
    too_long = client.send(random_data(2, [ROOM + 1, 3]))
    pieces = client.send(random_data(3, [ROOM] * 5), forward_only=True)
    step = client.optim_step()
    _, other_step = other.train(4)
    lab.work(loop)
    category, error = client.error(too_long)
    assert category == "server"
    assert error == (
        "forward_backward: the worker's memory does not hold its longest datum (25 tokens) even by itself; "
        "send shorter datums, or ask for a larger worker"
    )
    assert client.metrics(step)["failed_operations"] == 1
    for number, one in ((pieces, client), (other_step, other)):
        assert one.operation(number).state == DONE
    for one in (client, other):
        assert_close(state_of(loop, one), one.alone)
        assert one.row.crash_count == 0
    assert residents(loop) == {client.model_id, other.model_id}


@pytest.mark.usefixtures("small_machine")
def test_a_replay_leaves_out_what_did_not_fit(lab: Lab) -> None:
    loop, client = lab.worker(), lab.client()
    client.forward_backward(1)
    client.send(random_data(2, [ROOM + 1]))
    lab.work(loop)
    live = state_of(loop, client)
    lab.kill(loop)
    second = lab.worker()
    lab.restore(second, client)
    assert state_of(second, client).same_bits(live)


def test_a_creation_that_finds_no_memory_says_so(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, client, other = lab.worker(), lab.client(rank=2), lab.client(rank=3)
    real = lab.base.new_adapter

    def full(config: Any) -> Any:
        if config.rank == client.rank:
            raise MemoryError
        return real(config)

    monkeypatch.setattr(lab.base, "new_adapter", full)
    _, step = other.train(1)
    lab.work(loop)
    expected = "create_model: the worker has no memory left for it; try again later"
    assert client.error(0) == ("server", expected)
    assert client.row.failed and other.operation(step).state == DONE
