"""Whatever order requests arrive in and wherever workers die, every run ends as it would have alone."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.db import Database
from app.runs.log import DONE
from tests.unit.workers.train.train_lab import Client, Lab, alone, assert_close, state_of

SCRIPTS = {
    2: (("fb", 1), ("fb", 2), ("step", 0), ("fb", 3), ("step", 0)),
    3: (("fb", 4), ("step", 0), ("fb", 5), ("step", 0), ("step", 0), ("fb", 6)),
}
"""Rank of the run → what its client sends."""
ARRIVALS = [(rank, seq_id) for rank, script in SCRIPTS.items() for seq_id in range(1, len(script) + 1)]
DEATHS = 2
"""Fewer than it takes to give an operation up."""


def send(client: Client, seq_id: int) -> None:
    kind, data_seed = SCRIPTS[client.rank][seq_id - 1]
    if kind == "fb":
        client.forward_backward(data_seed, seq_id=seq_id)
    else:
        client.optim_step(seq_id=seq_id)


def expected_script(rank: int) -> tuple[tuple[str, int], ...]:
    """A step without a gradient changes nothing, so the reference leaves it out."""
    script = SCRIPTS[rank]
    return tuple(item for i, item in enumerate(script) if item[0] == "fb" or script[i - 1][0] == "fb")


@given(
    arrivals=st.permutations(ARRIVALS),
    turns=st.lists(st.integers(0, 2), min_size=len(ARRIVALS), max_size=len(ARRIVALS)),
    deaths=st.sets(st.integers(0, len(ARRIVALS) - 1), max_size=DEATHS),
    often=st.booleans(),
    slots=st.integers(1, 2),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_any_arrival_order_and_any_deaths_give_the_adapters_of_solo_runs(
    migrated_sqlite: Path,
    arrivals: list[tuple[int, int]],
    turns: list[int],
    deaths: set[int],
    often: bool,
    slots: int,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{shutil.copy(migrated_sqlite, Path(folder) / 'tinworks.db')}")
        lab = Lab(database, Path(folder), snapshot_operations=2 if often else 1000, train_slots=slots)
        try:
            check(lab, arrivals, turns, deaths)
        finally:
            lab.close()
            database.dispose()


def check(lab: Lab, arrivals: list[tuple[int, int]], turns: list[int], deaths: set[int]) -> None:
    clients = {rank: lab.client(rank=rank, seed=rank) for rank in SCRIPTS}
    loop = lab.worker()
    for i, ((rank, seq_id), count) in enumerate(zip(arrivals, turns, strict=True)):
        send(clients[rank], seq_id)
        for _ in range(count):
            loop.cycle()
        if i in deaths:
            lab.kill(loop)
            loop = lab.worker()
    lab.work(loop)
    for rank, client in clients.items():
        last = len(SCRIPTS[rank])
        assert client.row.applied_seq == last
        assert all(client.operation(seq_id).state == DONE for seq_id in range(last + 1))
        if client.model_id not in loop._slots:
            lab.restore(loop, client)
        assert_close(state_of(loop, client), alone(rank, rank, expected_script(rank)))
