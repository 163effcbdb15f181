"""What is done to a service, and when: drawn from a seed, so that a run can be repeated with the same blows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

LEASE_S = 2.0
"""A run's lease, and a sampler's claim, in the services of this suite."""
KILLS = 8
SPAN_S = 22.0
"""Scripts take so long at least; the blows begin before they end."""

BlowKind = Literal[
    "web", "train", "rank", "sample", "beat", "redis", "postgres", "pause", "cut", "stall", "drop", "repeat", "shuffle"
]
"""`web` to `postgres`: SIGKILL of one process of that role, an immediate stop for `postgres`. `pause`: a train worker
is stopped for longer than its lease. `cut`, `stall`: workers' connections to the database break and none can be made,
or nothing passes any more. `drop`, `repeat`, `shuffle`: of the doorbells."""
KILLING = ("web", "train", "rank", "sample", "beat", "redis", "postgres")
Database = Literal["postgres", "sqlite"]
Store = Literal["local", "s3"]
Layout = Literal["one", "two", "ranks"]
"""Of train workers: one, two, or one that computes on two ranks."""
DATABASES: Sequence[Database] = get_args(Database)
STORES: Sequence[Store] = get_args(Store)
LAYOUTS: Sequence[Layout] = get_args(Layout)


@dataclass(frozen=True, slots=True)
class Blow:
    """One of them. `at_s`: after the scripts have begun; `for_s`: how long it lasts, if it does; `choice`: which of
    several processes, in [0, 1)."""

    kind: BlowKind
    at_s: float
    for_s: float
    choice: float

    def __str__(self) -> str:
        lasting = f"/{self.for_s:.1f}s" if self.kind in ("pause", "cut", "stall", "drop", "repeat", "shuffle") else ""
        return f"{self.kind}@{self.at_s:.1f}{lasting}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A service, and what is done to it. `batch_polls`: its clients poll with `sample_use_retrieve_futures`."""

    seed: int
    database: Database
    store: Store
    layout: Layout
    batch_polls: bool
    blows: tuple[Blow, ...]

    @property
    def command(self) -> str:
        """What repeats it."""
        polls = " --batch-polls" if self.batch_polls else " --no-batch-polls"
        return (
            f"python -m tests.chaos --seed {self.seed} --database {self.database} --store {self.store} "
            f"--layout {self.layout} --kills {len(self.blows)}{polls}"
        )


def draw(
    seed: int,
    *,
    database: Database | None = None,
    store: Store | None = None,
    layout: Layout | None = None,
    batch_polls: bool | None = None,
    kills: int = KILLS,
) -> Plan:
    """The plan of a seed; what is given is not drawn, and changes no other draw than that of the blows.

    Every kind comes once before any comes again. A Redis that dies and a web process that dies are too much for
    `batch_polls`, as its setting says: only one of them does.
    """
    service = random.Random(f"service {seed}")
    drawn_database, drawn_store = service.choice(DATABASES), service.choice(STORES)
    drawn_layout, drawn_polls = service.choice(LAYOUTS), service.random() < 0.25
    database, store, layout = database or drawn_database, store or drawn_store, layout or drawn_layout
    batch_polls = drawn_polls if batch_polls is None else batch_polls
    kinds = list(get_args(BlowKind))
    if database == "sqlite":
        kinds = [kind for kind in kinds if kind not in ("postgres", "cut", "stall")]
    if layout != "ranks":
        kinds.remove("rank")
    if batch_polls:
        kinds.remove(service.choice(("web", "redis")))
    chance = random.Random(f"blows {seed} {kinds}")
    deck: list[BlowKind] = []
    while len(deck) < kills:
        deck += chance.sample(kinds, len(kinds))
    moments = sorted(chance.uniform(0.5, 0.85 * SPAN_S) for _ in range(kills))
    blows = tuple(
        Blow(kind, at_s, for_s=chance.uniform(1.5, 2.5) * LEASE_S, choice=chance.random())
        for kind, at_s in zip(deck[:kills], moments, strict=True)
    )
    return Plan(seed, database, store, layout, batch_polls, blows)
