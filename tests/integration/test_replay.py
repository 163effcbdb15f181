"""What a worker has computed together is repeated together: the same bits, in as many passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import update

from app.runs.log import ACCEPTED
from app.runs.models import Operation
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, random_data, residents, state_of
from workers.model import engine
from workers.model.base import BaseModel
from workers.model.forward import Work
from workers.train.execute import Executor
from workers.train.loop import TrainLoop

NEVER = {"snapshot_operations": 10_000, "snapshot_seconds": 1e6}


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many requests each pass has had."""
    real, sizes = engine.run_pass, []

    def counted(base: BaseModel, works: Sequence[Work], **options: Any) -> Any:
        if works:
            sizes.append(len(works))
        return real(base, works, **options)

    monkeypatch.setattr(engine, "run_pass", counted)
    return sizes


def pipelined(client: Client, seed: int = 0) -> None:
    """Two steps of a script that awaits nothing, and a pending gradient."""
    for number in range(2):
        for part in range(3):
            client.send(random_data(100 * seed + 10 * number + part, [9 - part, 5 + part, 12]))
        client.optim_step(note=False)
    client.send(random_data(100 * seed + 99, [3, 14]))
    client.send(random_data(100 * seed + 98, [11]))


def taken_over(lab: Lab, dead: TrainLoop, *clients: Client) -> TrainLoop:
    """Another worker holds the runs of one that was killed; they have had a request more, which does not train."""
    lab.kill(dead)
    loop = lab.worker(**NEVER)
    for client in clients:
        client.send(random_data(1), forward_only=True)
    lab.work(loop)
    assert residents(loop) == {client.model_id for client in clients}
    return loop


def test_what_was_pipelined_is_repeated_bit_for_bit(each_lab: Lab, passes: list[int]) -> None:
    lab, client = each_lab, each_lab.client()
    first = lab.worker(**NEVER)
    pipelined(client)
    lab.work(first)
    assert passes == [3, 3, 2]
    before = state_of(first, client)
    passes.clear()
    second = taken_over(lab, first, client)
    assert passes == [3, 3, 2, 1]
    assert state_of(second, client).same_bits(before)


def test_one_by_one_gives_other_bits(lab: Lab, passes: list[int]) -> None:
    """As the log of an older release, which does not say what was computed together, is repeated."""
    first, client = lab.worker(**NEVER), lab.client()
    pipelined(client)
    lab.work(first)
    before = state_of(first, client)
    passes.clear()
    with lab.database.write() as session:
        session.execute(update(Operation).values(pass_id=None))
    second = taken_over(lab, first, client)
    assert passes == [1] * 9
    assert not state_of(second, client).same_bits(before)
    assert_close(state_of(second, client), before)


def test_what_tenants_have_shared_they_share_again(each_lab: Lab, passes: list[int]) -> None:
    lab = each_lab
    first, clients = lab.worker(**NEVER), [lab.client(rank=rank, seed=rank) for rank in (2, 4, 5)]
    lab.work(first)
    for client in clients:
        pipelined(client, seed=client.rank)
    lab.work(first)
    before, sizes = [state_of(first, client) for client in clients], list(passes)
    assert sizes == [9, 9, 6]
    passes.clear()
    second = taken_over(lab, first, *clients)
    assert passes[:3] == sizes and sum(passes[3:]) == 3
    for client, state in zip(clients, before, strict=True):
        assert_close(state_of(second, client), state)
        assert state_of(second, client).counters == state.counters


def test_whoever_comes_back_alone_repeats_its_own_part(lab: Lab, passes: list[int]) -> None:
    first, mine, other = lab.worker(**NEVER), lab.client(rank=2), lab.client(rank=3)
    lab.work(first)
    for client in (mine, other):
        pipelined(client)
    lab.work(first)
    before = state_of(first, mine)
    passes.clear()
    second = taken_over(lab, first, mine)
    assert passes == [3, 3, 2, 1]
    assert_close(state_of(second, mine), before)


def test_a_pass_that_only_looked_is_not_repeated(lab: Lab, passes: list[int]) -> None:
    first, client = lab.worker(**NEVER), lab.client()
    client.train(1)
    lab.work(first)
    client.send(random_data(2), forward_only=True)
    lab.work(first)
    before = state_of(first, client)
    passes.clear()
    second = taken_over(lab, first, client)
    assert passes == [1, 1]  # the training, and what came after the death
    assert state_of(second, client).same_bits(before)


def test_what_failed_within_a_pass_leaves_the_rest_together(lab: Lab, passes: list[int]) -> None:
    first, client = lab.worker(**NEVER), lab.client()
    lab.work(first)
    client.send(random_data(1, [4, 8]))
    client.bad_forward_backward()
    client.send(random_data(2, [7]))
    lab.work(first)
    before = state_of(first, client)
    assert passes == [2] and before.counters[1] == (2,)
    passes.clear()
    second = taken_over(lab, first, client)
    assert passes == [2, 1]
    assert state_of(second, client).same_bits(before)


def test_one_that_cannot_be_repeated_holds_up_nobody_who_shared_its_passes(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, sick, healthy = lab.worker(**NEVER), lab.client(rank=2), lab.client(rank=3)
    lab.work(first)
    for client in (sick, healthy):
        pipelined(client)
    lab.work(first)
    before = state_of(first, healthy)
    lab.kill(first)
    real = Executor._work

    def broken(self: Executor, operation: Any, *args: Any) -> Work:
        if operation.model_id == sick.model_id:
            raise RuntimeError("CUDA error")
        return real(self, operation, *args)

    step = sick.optim_step()
    healthy.send(random_data(1), forward_only=True)
    second = lab.worker(**NEVER)
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_work", broken)
        assert second.cycle()
    assert residents(second) == {healthy.model_id}
    assert_close(state_of(second, healthy), before)
    assert sick.operation(step).state == ACCEPTED and sick.row.crash_count == 2
    lab.work(second)
    assert sick.metrics(step)


def test_the_loss_of_one_runs_body_is_not_another_ones(lab: Lab) -> None:
    first, sick, healthy = lab.worker(**NEVER), lab.client(rank=2), lab.client(rank=3)
    lab.work(first)
    for client in (sick, healthy):
        client.send(random_data(1, [40] * 200))
    lab.work(first)
    before = state_of(first, healthy)
    blob = sick.operation(1).body_blob
    assert blob is not None
    lab.blobs.delete(blob)
    lab.kill(first)
    second = lab.worker(**NEVER)
    for client in (sick, healthy):
        client.optim_step()
    healthy_too = lab.client(rank=4)
    lab.work(second)
    assert residents(second) == {healthy.model_id, healthy_too.model_id}
    assert before.counters[0] == 1 and healthy.operation(2).state == "done"


def test_large_snapshots_are_not_all_read_in_one_turn(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    first, clients = lab.worker(), [lab.client(rank=rank) for rank in (2, 3, 4)]
    for client in clients:
        client.train(1)
    lab.work(first)
    first.hand_over()
    for client in clients:
        client.train(2)
    monkeypatch.setattr("workers.train.residency._TAKING_S", 0.0)
    second = lab.worker()
    for count in (1, 2, 3):
        second.cycle()
        assert len(residents(second)) == count
        assert sum(client.row.worker_id is not None for client in clients) == count
    lab.work(second)
    for client in clients:
        assert client.row.crash_count == 0
        assert_close(state_of(second, client), client.alone)


Burst = tuple[int, Sequence[str]]


def act(client: Client, what: str, seed: int) -> None:
    acts: dict[str, Callable[[], object]] = {
        "pass": lambda: client.send(random_data(seed, [3 + seed % 7, 5])),
        "look": lambda: client.send(random_data(seed, [4]), forward_only=True),
        "bad": client.bad_forward_backward,
        "step": lambda: client.optim_step(note=False),
    }
    acts[what]()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.sampled_from(["pass", "pass", "look", "bad", "step"]), max_size=4)),
        min_size=1,
        max_size=10,
    ),
    st.data(),
)
def test_whatever_was_sent_together_comes_back_as_it_was(
    lab: Lab, bursts: Sequence[Burst], data: st.DataObject
) -> None:
    first, clients = lab.worker(**NEVER), [lab.client(rank=rank, seed=rank) for rank in (2, 3, 4)]
    for number, (whose, acts) in enumerate(bursts):
        for place, what in enumerate(acts):
            act(clients[whose], what, 10 * number + place)
        if data.draw(st.booleans(), label="a cycle"):
            first.cycle()
    for client in clients:  # what was refused on arrival is consumed with the next operation
        act(client, "look", 1)
    lab.work(first)
    before = [state_of(first, client) for client in clients]
    second = taken_over(lab, first, *clients)
    for client, state in zip(clients, before, strict=True):
        assert_close(state_of(second, client), state)
        assert state_of(second, client).counters == state.counters
    lab.kill(second)
