"""A worker dies just before or just after any step of its work, and another one finishes: the same bits, nothing twice.

The death is an exception that nothing catches, after which no step of that worker does anything any more; the next one
is a new object on the same database and store. Real processes die in `test_real_workers_die`.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

import pytest
from sqlalchemy import func, select

from app.billing.models import Usage
from app.checkpoints.service import SAMPLER, TRAINING
from app.db import Database
from tests.faults import audit
from tests.faults.points import POINTS, Points, When
from tests.unit.workers.train.train_lab import Client, Killed, Lab, State, random_data, slot_of, state_of
from workers import snapshot_files
from workers.train.loop import TrainLoop

SETTINGS = {"snapshot_operations": 3, "inline_bytes": 400}
LARGE = [40, 40, 40]
"""Lengths of data whose body and result are blobs."""
SCRIPT: Sequence[Callable[[Client], object]] = (
    lambda client: client.send(random_data(1)),
    lambda client: client.send(random_data(2, LARGE)),
    lambda client: client.bad_forward_backward(),
    lambda client: client.optim_step(),
    lambda client: client.save("first"),
    lambda client: client.send(random_data(3, LARGE)),
    lambda client: client.send(random_data(4)),
    lambda client: client.optim_step(),
    lambda client: client.save_for_sampler(path="second"),
    lambda client: client.send(random_data(5, LARGE), forward_only=True),
    lambda client: client.load(f"tinker://{client.model_id}/weights/first", optimizer=True),
    lambda client: client.send(random_data(6, LARGE)),
    lambda client: client.optim_step(),
    lambda client: client.save("last"),
    lambda client: client.send(random_data(7)),
)
"""One request at a time, so that passes have the same shapes whoever computes them. The last gradient is pending."""
REPLACED, HANDED_OVER = 8, 12
"""Before the first one another worker takes over, without a warning; after the second one the run leaves its slot."""


@dataclass(frozen=True)
class Outcome:
    """What a client has in the end."""

    state: State
    results: tuple[bytes | str, ...]
    checkpoints: dict[str, dict[str, bytes]]
    used: dict[str, int]

    def assert_same(self, other: Outcome) -> None:
        assert self.results == other.results
        assert self.checkpoints == other.checkpoints
        assert self.used == other.used
        assert self.state.same_bits(other.state)


def outcome(lab: Lab, loop: TrainLoop, client: Client) -> Outcome:
    rows = [client.operation(seq_id) for seq_id in range(client.next_seq)]
    results = [lab.blobs.get(row.result_blob) if row.result_blob else row.error or row.result for row in rows]
    with lab.database.read() as session:
        used = session.execute(select(Usage.kind, func.sum(Usage.amount)).group_by(Usage.kind)).tuples().all()
    names = [(TRAINING, "first"), (SAMPLER, "second"), (TRAINING, "last")]
    checkpoints = {name: snapshot_files.read(lab.blobs, lab.snapshot_of(client, kind, name)) for kind, name in names}
    return Outcome(
        state_of(loop, client),
        tuple(_anonymous(result or b"", client.model_id) for result in results),
        checkpoints,
        {kind: int(amount) for kind, amount in used},
    )


def _anonymous(result: bytes | str, model_id: str) -> bytes | str:
    if isinstance(result, str):
        return result.replace(model_id, "RUN")
    return result.replace(model_id.encode(), b"RUN")


def die() -> NoReturn:
    raise Killed


@contextmanager
def patched() -> Iterator[Points]:
    with pytest.MonkeyPatch.context() as patch:
        yield Points(patch.setattr, die)


@contextmanager
def new_lab(migrated: Path) -> Iterator[Lab]:
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{shutil.copy(migrated, Path(folder) / 'tinworks.db')}")
        audit.begin(database)
        lab = Lab(database, Path(folder), **SETTINGS)
        try:
            yield lab
        finally:
            lab.close()
            database.dispose()


def perform(lab: Lab, points: Points, fatal: tuple[str, When, int] | None) -> tuple[Outcome, Counter[str]]:
    """The script, by one worker and, once that has died, by another. Returns also how often the steps were taken."""
    loop, client = lab.worker(), lab.client()
    if fatal:
        points.arm(*fatal)
    died = False
    for number, act in enumerate((lambda client: None, *SCRIPT)):
        act(client)
        if number == REPLACED:
            bury(lab, loop)
            loop = lab.worker()
        while True:
            try:
                lab.work(loop)
                lab.write_snapshots(loop)
                if number == HANDED_OVER:
                    loop.hand_over()
            except Killed:
                assert points.dead
            if not points.dead:
                break
            bury(lab, loop)
            points.disarm()
            loop, died = lab.worker(), True
    assert died == (fatal is not None)
    counted = points.calls.copy()
    if client.model_id not in loop._slots:
        lab.restore(loop, client)
    assert slot_of(loop, client).applied_seq == client.next_seq - 1
    audit.assert_exactly_once(lab.database, client.model_id, client.next_seq - 1)
    return outcome(lab, loop, client), counted


def bury(lab: Lab, loop: TrainLoop) -> None:
    """End the threads of a worker that has died, while they can do nothing any more, and let its leases run out."""
    loop._saver.stop(10)
    lab.kill(loop)


@lru_cache(maxsize=1)
def undisturbed(migrated: Path) -> tuple[Outcome, Counter[str]]:
    with new_lab(migrated) as lab, patched() as points:
        return perform(lab, points, None)


def test_the_script_takes_every_step(migrated_sqlite: Path) -> None:
    _, calls = undisturbed(migrated_sqlite)
    assert not POINTS.keys() - {name for name, count in calls.items() if count}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", POINTS)
def test_another_worker_finishes_with_the_same_bits(migrated_sqlite: Path, name: str, when: When) -> None:
    expected, calls = undisturbed(migrated_sqlite)
    with new_lab(migrated_sqlite) as lab, patched() as points:
        found, _ = perform(lab, points, (name, when, (calls[name] + 1) // 2))
    found.assert_same(expected)
