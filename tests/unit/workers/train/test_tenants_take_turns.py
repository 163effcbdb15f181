"""The shares of tenants over many plans: simulated queues that fill while cycles run, and what each run gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from app.runs.log import ACCEPTED, FAILED, Ready
from workers.train.planner import STEP_KIND, Plan, RunQueue, plan
from workers.train.turns import Shares

LARGEST = 40


@dataclass
class Simulation:
    """Runs with queues, planned cycle by cycle as the train loop does it: the run served longest ago comes first."""

    budget: int
    owners: dict[str, str] = field(default_factory=dict)
    queues: dict[str, list[Ready]] = field(default_factory=dict)
    served: dict[str, list[Ready]] = field(default_factory=dict)
    shares: Shares = field(default_factory=Shares)
    _sent: dict[str, int] = field(default_factory=dict)
    _order: list[str] = field(default_factory=list)

    def run(self, model_id: str, owner_id: str) -> None:
        self.owners[model_id] = owner_id
        self.queues[model_id], self.served[model_id] = [], []
        self._sent[model_id] = 0
        self._order.append(model_id)

    def send(self, model_id: str, tokens: int, *, kind: str = "forward_backward", state: str = ACCEPTED) -> None:
        self._sent[model_id] += 1
        self.queues[model_id].append(Ready(model_id, self._sent[model_id], kind, state, tokens, 0))

    def call(self, model_id: str, *chunks: int) -> None:
        """A `forward_backward` in chunks and its step."""
        for tokens in chunks:
            self.send(model_id, tokens)
        self.send(model_id, 0, kind=STEP_KIND)

    def planned(self) -> Plan:
        queues = [RunQueue(name, self.owners[name], tuple(self.queues[name])) for name in self._order]
        return plan(queues, pass_tokens=self.budget, shares=self.shares)

    def cycle(self) -> Plan:
        planned = self.planned()
        self.shares = planned.shares
        for operation in planned.operations:
            assert self.queues[operation.model_id].pop(0) == operation, "an operation was overtaken"
            self.served[operation.model_id].append(operation)
        moved = {operation.model_id for operation in planned.operations}
        self._order = [name for name in self._order if name not in moved] + [n for n in self._order if n in moved]
        return planned

    def tokens_of(self, planned: Plan, owner_id: str) -> int:
        return sum(o.tokens for o in planned.forward if self.owners[o.model_id] == owner_id)

    def waits(self, owner_id: str) -> bool:
        return any(queue for name, queue in self.queues.items() if self.owners[name] == owner_id)


def total(operations: Sequence[Ready]) -> int:
    return sum(operation.tokens for operation in operations)


sizes = st.integers(1, LARGEST)
budgets = st.sampled_from([8, 30, 64])


@st.composite
def arrivals(draw: st.DrawFn) -> tuple[dict[str, str], list[list[tuple[str, str, str, int]]]]:
    """Runs with their owners, and what is sent before each of some cycles."""
    owners = {f"run-{i}": draw(st.sampled_from("abc")) for i in range(draw(st.integers(1, 5)))}
    kinds = st.sampled_from(["forward_backward", "forward", STEP_KIND, "save_weights", "load_weights"])
    states = st.sampled_from([ACCEPTED, ACCEPTED, ACCEPTED, FAILED])
    one = st.tuples(st.sampled_from(sorted(owners)), kinds, states, sizes)
    return owners, draw(st.lists(st.lists(one, max_size=6), min_size=1, max_size=8))


def simulate(
    budget: int, owners: dict[str, str], batches: Sequence[Sequence[tuple[str, str, str, int]]]
) -> tuple[Simulation, list[Plan]]:
    """Those arrivals, and then cycles until everything is done."""
    simulation = Simulation(budget)
    for model_id, owner_id in owners.items():
        simulation.run(model_id, owner_id)
    plans = []
    for batch in batches:
        for model_id, kind, state, tokens in batch:
            carries = kind.startswith("forward") and state == ACCEPTED
            simulation.send(model_id, tokens if carries else 0, kind=kind, state=state)
        plans.append(simulation.cycle())
    while any(simulation.queues.values()):
        plans.append(simulation.cycle())
        assert plans[-1].operations
    return simulation, plans


@given(budgets, arrivals())
def test_every_run_is_served_in_its_own_order_whatever_arrives_when(
    budget: int, script: tuple[dict[str, str], list[list[tuple[str, str, str, int]]]]
) -> None:
    simulation, _ = simulate(budget, *script)
    for served in simulation.served.values():
        assert [operation.seq_id for operation in served] == list(range(1, len(served) + 1))


@given(budgets, arrivals())
def test_every_pass_keeps_to_the_budget_or_is_one_operation(
    budget: int, script: tuple[dict[str, str], list[list[tuple[str, str, str, int]]]]
) -> None:
    for planned in simulate(budget, *script)[1]:
        paid = [operation for operation in planned.forward if operation.tokens]
        assert total(paid) <= budget or len(paid) == 1


@given(budgets, arrivals())
def test_the_same_queues_and_shares_give_the_same_plan(
    budget: int, script: tuple[dict[str, str], list[list[tuple[str, str, str, int]]]]
) -> None:
    once, again = simulate(budget, *script)[1], simulate(budget, *script)[1]
    assert once == again


@st.composite
def loads(draw: st.DrawFn) -> tuple[int, Callable[[Simulation], None]]:
    """A budget, and tenants of all habits: those that flood, those that await each answer, those that pipeline two."""
    budget = draw(budgets)
    runs = []
    for owner in "abcd"[: draw(st.integers(2, 4))]:
        for number in range(draw(st.integers(1, 3))):
            depth = draw(st.sampled_from([1, 2, 30]))
            runs.append((f"{owner}{number}", owner, depth, draw(st.lists(sizes, min_size=1, max_size=4))))

    def arrive(simulation: Simulation) -> None:
        for name, owner, depth, its_sizes in runs:
            if name not in simulation.queues:
                simulation.run(name, owner)
            while len(simulation.queues[name]) < depth:
                simulation.send(name, its_sizes[simulation._sent[name] % len(its_sizes)])

    return budget, arrive


@settings(max_examples=60)
@given(loads(), st.integers(0, 2**32))
def test_every_run_gets_on_within_a_bounded_number_of_plans(
    load: tuple[int, Callable[[Simulation], None]], gaps: int
) -> None:
    """Within 2·T·R·(1 + h/B) plans: T tenants, R runs of its tenant, h the largest operation, B the budget."""
    budget, arrive = load
    simulation = Simulation(budget)
    waited: dict[str, int] = {}
    for cycle in range(80):
        if not gaps >> cycle % 32 & 1:
            arrive(simulation)
        moved = {operation.model_id for operation in simulation.cycle().operations}
        tenants = len(set(simulation.owners.values()))
        for name, owner in simulation.owners.items():
            waited[name] = 0 if name in moved or not simulation.queues[name] else waited.get(name, 0) + 1
            runs = sum(other == owner for other in simulation.owners.values())
            assert waited[name] <= 2 * tenants * runs * (1 + LARGEST / budget)


@settings(max_examples=60)
@given(loads())
def test_two_tenants_that_both_wait_get_as_many_tokens_each(load: tuple[int, Callable[[Simulation], None]]) -> None:
    """In any window of plans the difference is at most a budget and two operations."""
    budget, arrive = load
    simulation = Simulation(budget)
    drift: dict[tuple[str, str], tuple[int, int, int]] = {}
    for _ in range(80):
        arrive(simulation)
        planned = simulation.cycle()
        owners = sorted(set(simulation.owners.values()))
        for pair in ((a, b) for a in owners for b in owners if a < b):
            if not all(map(simulation.waits, pair)):
                drift.pop(pair, None)
                continue
            now, low, high = drift.get(pair, (0, 0, 0))
            now += simulation.tokens_of(planned, pair[0]) - simulation.tokens_of(planned, pair[1])
            drift[pair] = now, min(low, now), max(high, now)
            assert drift[pair][2] - drift[pair][1] <= budget + 2 * LARGEST


@settings(max_examples=60)
@given(budgets, st.lists(sizes, min_size=1, max_size=5), st.lists(sizes, min_size=1, max_size=5), st.integers(1, 9))
def test_a_tenant_with_many_runs_gets_no_more_than_one_with_a_single_run(
    budget: int, his: list[int], hers: list[int], runs: int
) -> None:
    simulation = Simulation(budget)
    for i in range(runs):
        simulation.run(f"a{i}", "a")
    simulation.run("b", "b")
    for name, turn in [(name, i) for name in simulation.owners for i in range(400)]:
        simulation.send(name, (his if name == "b" else hers)[turn % len(his if name == "b" else hers)])
    got = {"a": 0, "b": 0}
    for _ in range(40):
        planned = simulation.cycle()
        if not (simulation.waits("a") and simulation.waits("b")):
            return
        for owner in got:
            got[owner] += simulation.tokens_of(planned, owner)
        assert abs(got["a"] - got["b"]) <= budget + 2 * LARGEST


@given(budgets, arrivals())
def test_room_in_a_pass_is_left_only_for_the_sake_of_others(
    budget: int, script: tuple[dict[str, str], list[list[tuple[str, str, str, int]]]]
) -> None:
    """With one tenant alone a pass takes all that fits; only steps and saves may be a cycle before it."""
    owners, batches = script
    simulation = Simulation(budget)
    for model_id in owners:
        simulation.run(model_id, "a")
    for batch in batches:
        for model_id, _, _, tokens in batch:
            simulation.send(model_id, tokens)
    while any(simulation.queues.values()):
        planned = simulation.cycle()
        left = budget - total(planned.forward)
        assert all(queue[0].tokens > left for queue in simulation.queues.values() if queue)


def flooded(budget: int = 64, *, runs: int = 4, tokens: int = 8) -> Simulation:
    """A tenant "a" with far more work than a pass takes, some passes on its way; and a run "b" of another tenant."""
    simulation = Simulation(budget)
    for i in range(runs):
        simulation.run(f"a{i}", "a")
        for _ in range(100):
            simulation.send(f"a{i}", tokens)
    for _ in range(3):
        assert total(simulation.cycle().forward) == budget
    simulation.run("b", "b")
    return simulation


def test_small_work_beside_a_flood_is_a_short_pass_and_the_flood_goes_on_after_it() -> None:
    simulation = flooded()
    for _ in range(5):
        simulation.send("b", 4)
        assert [o.model_id for o in simulation.cycle().forward] == ["b"]
        simulation.send("b", 4)  # back at once: the pass after a short one is not short, but half as long as others
        half = simulation.cycle()
        assert simulation.budget // 2 - 8 < total(half.forward) <= simulation.budget // 2
        assert "b" in {o.model_id for o in half.forward}
        assert total(simulation.cycle().forward) == simulation.budget


def test_a_step_beside_a_flood_waits_for_no_pass() -> None:
    simulation = flooded()
    simulation.send("b", 0, kind=STEP_KIND)
    assert [o.model_id for o in simulation.cycle().operations] == ["b"]
    simulation.send("b", 0, kind=STEP_KIND)
    planned = simulation.cycle()
    assert [o.model_id for o in planned.steps_before] == ["b"]
    assert total(planned.forward) == simulation.budget // 2


def test_small_work_is_not_put_off_by_steps_of_the_flood() -> None:
    simulation = flooded()
    simulation.run("a-other", "a")
    simulation.send("a-other", 0, kind=STEP_KIND)
    simulation.send("b", 4)
    assert [o.model_id for o in simulation.cycle().operations] == ["a-other", "b"]


def test_a_step_and_a_short_pass_share_a_cycle() -> None:
    simulation = Simulation(64)
    simulation.run("a", "a")
    simulation.run("b", "b")
    simulation.send("a", 16)
    simulation.send("b", 0, kind=STEP_KIND)
    assert len(simulation.cycle().operations) == 2


def test_an_operation_over_the_budget_goes_alone_and_the_small_ones_first() -> None:
    simulation = Simulation(64)
    for name in "abc":
        simulation.run(name, name)
    simulation.send("a", 1000)
    simulation.send("b", 5)
    simulation.send("c", 6)
    assert [o.model_id for o in simulation.cycle().forward] == ["b", "c"]
    for name in "bc":
        simulation.send(name, 5)
    assert [o.model_id for o in simulation.cycle().forward] == ["a"]
    assert [o.model_id for o in simulation.cycle().forward] == ["b", "c"]


def test_operations_over_the_budget_are_not_kept_out_by_a_stream_of_small_ones() -> None:
    simulation = Simulation(64)
    simulation.run("big", "a")
    for _ in range(20):
        simulation.send("big", 65)
    for i in range(40):
        simulation.run(f"small-{i}", f"newcomer-{i}")
        simulation.send(f"small-{i}", 1)
        simulation.cycle()
    assert len(simulation.served["big"]) == 20


def test_the_chunks_of_one_call_meet_in_one_pass_and_its_step_follows_in_the_same_cycle() -> None:
    simulation = Simulation(64)
    for name in ("a0", "a1"):
        simulation.run(name, "a")
        simulation.call(name, 12, 12, 12)
    planned = simulation.cycle()
    assert [o.model_id for o in planned.forward] == ["a0", "a0", "a0", "a1", "a1"]
    assert [o.model_id for o in planned.steps_after] == ["a0"]
    assert [o.model_id for o in simulation.cycle().operations] == ["a1", "a1"]


def test_chunks_of_one_call_take_no_turn_of_another_tenant() -> None:
    simulation = Simulation(64)
    simulation.run("a", "a")
    simulation.run("b", "b")
    simulation.call("a", *[16] * 4)
    simulation.call("b", *[16] * 4)
    assert [o.model_id for o in simulation.cycle().forward] == ["a", "b", "a", "b"]


def test_runs_of_one_tenant_take_turns() -> None:
    simulation = Simulation(64)
    for i in range(5):
        simulation.run(f"a{i}", "a")
        for _ in range(100):
            simulation.send(f"a{i}", 8)
    for _ in range(10):
        simulation.cycle()
    assert {len(served) for served in simulation.served.values()} == {16}


def test_what_a_tenant_had_while_nobody_else_waited_costs_it_at_most_half_a_budget() -> None:
    simulation = flooded(runs=1)
    for _ in range(100):
        simulation.send("b", 8)
    got = {"a": 0, "b": 0}
    for _ in range(4):
        planned = simulation.cycle()
        for owner in got:
            got[owner] += simulation.tokens_of(planned, owner)
    assert 0 < got["b"] - got["a"] <= 32 + 8


def test_a_run_whose_operation_never_fits_behind_others_has_its_turn_too() -> None:
    simulation = Simulation(64)
    for name in ("a0", "b0", "b1"):
        simulation.run(name, name[0])
    for _ in range(12):
        for name, tokens in (("a0", 31), ("a0", 31), ("b0", 31), ("b1", 35)):
            simulation.send(name, tokens)
        simulation.cycle()
    assert len(simulation.served["b1"]) >= 3


def test_shares_begin_anew_when_nobody_waits() -> None:
    simulation = flooded()
    assert simulation.shares.ahead
    for queue in simulation.queues.values():
        queue.clear()
    simulation.cycle()
    assert simulation.shares == Shares()
