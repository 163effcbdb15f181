"""The laws of the planner, for any queues: order within a run, the token budget, a share for every owner."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.runs.log import ACCEPTED, FAILED, Ready
from workers.train.planner import MAX_CRASHES, NO_SHARES, PASS_KINDS, STEP_KIND, Plan, RunQueue, plan

CONTROL = ("create_model", "save_weights", "save_weights_for_sampler", "save_weights_external", "load_weights")
KINDS = (*PASS_KINDS, STEP_KIND, *CONTROL)


def operations(model_id: str, *specs: tuple[str, str, int]) -> list[Ready]:
    return [Ready(model_id, i, kind, state, tokens, 0) for i, (kind, state, tokens) in enumerate(specs, 5)]


@st.composite
def queues(draw: st.DrawFn, *, crashes: st.SearchStrategy[int] = st.just(0)) -> list[RunQueue]:
    accepted = st.tuples(st.sampled_from(KINDS), st.just(ACCEPTED), st.integers(0, 20))
    failed = st.tuples(st.sampled_from((*KINDS, "missing")), st.just(FAILED), st.just(0))
    made = []
    for i in range(draw(st.integers(0, 6))):
        specs = draw(st.lists(accepted | failed, max_size=8))
        owner = draw(st.sampled_from(["alice", "bob", "carol"]))
        made.append(RunQueue(f"run-{i}", owner, operations(f"run-{i}", *specs), draw(crashes)))
    return made


def taken_of(planned: Plan, queue: RunQueue) -> list[Ready]:
    return [operation for operation in planned.operations if operation.model_id == queue.model_id]


@given(queues(crashes=st.integers(0, 4)), st.integers(1, 60))
def test_of_each_run_a_prefix_is_taken_in_order(runs: list[RunQueue], budget: int) -> None:
    planned = plan(runs, pass_tokens=budget)
    for queue in runs:
        taken = taken_of(planned, queue)
        assert taken == list(queue.operations[: len(taken)])
    assert len(planned.operations) == sum(len(taken_of(planned, queue)) for queue in runs)


@given(queues(), st.integers(1, 60))
def test_a_pass_stays_in_its_budget_or_holds_one_operation(runs: list[RunQueue], budget: int) -> None:
    sizes = [operation.tokens for operation in plan(runs, pass_tokens=budget).forward if operation.tokens]
    assert sum(sizes) <= budget or len(sizes) == 1


@given(queues(crashes=st.integers(0, 4)), st.integers(1, 60))
def test_every_stage_holds_only_its_own_kinds(runs: list[RunQueue], budget: int) -> None:
    planned = plan(runs, pass_tokens=budget)
    assert all(operation.kind in CONTROL and operation.state == ACCEPTED for operation in planned.control)
    assert all(operation.kind == STEP_KIND for operation in planned.steps_before + planned.steps_after)
    assert all(operation.kind in PASS_KINDS or operation.state == FAILED for operation in planned.forward)


@given(queues(crashes=st.integers(0, 4)), st.integers(1, 60))
def test_there_is_progress_whenever_there_is_work(runs: list[RunQueue], budget: int) -> None:
    has_work = any(queue.operations for queue in runs)
    assert bool(plan(runs, pass_tokens=budget).operations) == has_work


@given(queues(), st.integers(1, 60))
def test_every_queue_is_emptied_in_order_after_enough_cycles(runs: list[RunQueue], budget: int) -> None:
    left = {queue.model_id: list(queue.operations) for queue in runs}
    owners = {queue.model_id: queue.owner_id for queue in runs}
    for _ in range(sum(map(len, left.values()))):
        planned = plan([RunQueue(m, owners[m], rest) for m, rest in left.items()], pass_tokens=budget)
        for operation in planned.operations:
            assert left[operation.model_id].pop(0) == operation
    assert not any(left.values())


@given(queues())
def test_every_owner_gets_a_turn_within_three_cycles(runs: list[RunQueue]) -> None:
    """One may be for steps and saves alone, and then one with half the budget."""
    left, served, shares = runs, set(), NO_SHARES
    owners = {queue.owner_id for queue in runs if queue.operations}
    for _ in range(3):
        planned = plan(left, pass_tokens=20 * len(owners) or 1, shares=shares)
        shares = planned.shares
        served |= {queue.owner_id for queue in left if taken_of(planned, queue)}
        left = [
            RunQueue(queue.model_id, queue.owner_id, queue.operations[len(taken_of(planned, queue)) :])
            for queue in left
        ]
    assert served == owners


def test_a_long_queue_leaves_room_for_another_owner() -> None:
    greedy = RunQueue("a", "alice", operations("a", *[("forward_backward", ACCEPTED, 10)] * 50))
    modest = RunQueue("b", "bob", operations("b", *[("forward_backward", ACCEPTED, 10)] * 2))
    planned = plan([greedy, modest], pass_tokens=40)
    assert [operation.model_id for operation in planned.forward] == ["a", "b", "a", "b"]


def test_more_runs_give_an_owner_no_larger_share() -> None:
    many = [RunQueue(f"a{i}", "alice", operations(f"a{i}", ("forward", ACCEPTED, 10))) for i in range(9)]
    one = RunQueue("b", "bob", operations("b", *[("forward", ACCEPTED, 10)] * 9))
    planned = plan([*many, one], pass_tokens=80)
    owners = [operation.model_id[0] for operation in planned.forward]
    assert owners.count("a") == owners.count("b") == 4


def test_operations_that_failed_on_arrival_are_consumed_with_the_pass() -> None:
    queue = RunQueue(
        "a",
        "alice",
        operations(
            "a",
            ("missing", FAILED, 0),
            ("forward_backward", ACCEPTED, 5),
            ("save_weights", FAILED, 0),
            ("forward_backward", FAILED, 0),
            ("optim_step", FAILED, 0),
            ("optim_step", ACCEPTED, 0),
        ),
    )
    planned = plan([queue], pass_tokens=100)
    assert [operation.seq_id for operation in planned.forward] == [5, 6, 7, 8]
    assert [operation.seq_id for operation in planned.steps_after] == [9, 10]


@pytest.mark.parametrize("kind", CONTROL)
def test_a_control_operation_is_the_only_one_of_its_run_in_a_cycle(kind: str) -> None:
    queue = RunQueue("a", "alice", operations("a", (kind, ACCEPTED, 0), ("forward", ACCEPTED, 1)))
    assert taken_of(plan([queue], pass_tokens=100), queue) == [queue.operations[0]]


def test_a_control_operation_waits_behind_what_came_before_it() -> None:
    queue = RunQueue(
        "a",
        "alice",
        operations("a", ("forward", ACCEPTED, 1), ("optim_step", ACCEPTED, 0), ("save_weights", ACCEPTED, 0)),
    )
    planned = plan([queue], pass_tokens=100)
    assert [operation.seq_id for operation in planned.operations] == [5, 6]
    assert planned.control == []


def test_steps_of_many_runs_share_a_stage() -> None:
    runs = [RunQueue(m, m, operations(m, ("optim_step", ACCEPTED, 0), ("forward", ACCEPTED, 1))) for m in "abc"]
    planned = plan(runs, pass_tokens=100)
    assert [operation.model_id for operation in planned.steps_before] == ["a", "b", "c"]
    assert [operation.model_id for operation in planned.forward] == ["a", "b", "c"]


@given(queues(crashes=st.integers(1, MAX_CRASHES - 1)), st.integers(1, 60))
def test_a_run_at_which_a_worker_died_is_run_alone_and_step_by_step(runs: list[RunQueue], budget: int) -> None:
    waiting = [queue for queue in runs if queue.operations]
    assert plan(runs, pass_tokens=budget).operations == [queue.operations[0] for queue in waiting[:1]]


@given(queues(), st.integers(1, 60))
def test_a_suspect_waits_for_its_turn_and_keeps_out_of_others_passes(runs: list[RunQueue], budget: int) -> None:
    suspect = RunQueue("suspect", "mallory", operations("suspect", ("forward", ACCEPTED, 1)), crashes=1)
    first = next((queue for queue in runs if queue.operations), None)
    planned = plan([*runs, suspect], pass_tokens=budget)
    assert bool(taken_of(planned, suspect)) == (first is None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("crashes", range(MAX_CRASHES + 2))
def test_an_operation_is_given_up_after_three_deaths_and_not_before(kind: str, crashes: int) -> None:
    queue = RunQueue("a", "alice", operations("a", (kind, ACCEPTED, 1), ("forward", ACCEPTED, 1)), crashes=crashes)
    planned = plan([queue], pass_tokens=100)
    assert bool(planned.poisoned) == (crashes >= MAX_CRASHES == 3)
    if planned.poisoned:
        assert planned.operations == planned.poisoned == [queue.operations[0]]


def test_what_had_failed_already_is_consumed_not_poisoned() -> None:
    queue = RunQueue("a", "alice", operations("a", ("forward", FAILED, 0)), crashes=MAX_CRASHES)
    planned = plan([queue], pass_tokens=100)
    assert planned.poisoned == []
    assert planned.forward == list(queue.operations)


def test_the_pass_goes_round_the_owners_in_the_order_of_their_runs() -> None:
    order = list(itertools.permutations("abc"))
    for names in order:
        runs = [RunQueue(name, name, operations(name, *[("forward", ACCEPTED, 1)] * 2)) for name in names]
        assert [operation.model_id for operation in plan(runs, pass_tokens=9).forward] == [*names, *names]
