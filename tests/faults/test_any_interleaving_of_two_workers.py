"""A model of the log and the lease, held against the real ones: two workers, and whatever may happen to them.

The train loops, the log, the leases, the commits, the snapshots and the restores are the real ones, on a real SQLite
file; the engine counts (`counting_engine`). A worker can be paused between any two of claim, execute and commit, and go
on much later. The database's clock decides about leases, so a lease runs out by moving its end back.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from sqlalchemy import update
from sqlalchemy.exc import OperationalError

from app.db import Database
from app.runs import log
from app.runs.models import Operation, Run
from app.wire.types import Datum
from tests.faults import audit
from tests.faults.counting_engine import CountingEngine, Expected
from tests.services import wait_for
from tests.unit.workers.train.train_lab import Client, Lab
from workers.train import lease
from workers.train.effects import Effect
from workers.train.loop import TrainLoop
from workers.train.planner import MAX_CRASHES, Plan

RUNS, WORKERS = st.integers(0, 1), st.integers(0, 1)
Told = tuple[str, bytes | None, str | None]


class Paused(BaseException):
    """The worker stands still; what it was about to do is in its `Stepper`."""


class Stepper:
    """A worker that can be stopped before it executes or before it commits, and let go later."""

    def __init__(self, lab: Lab) -> None:
        self.loop: TrainLoop = lab.worker(CountingEngine(lab.base))  # type: ignore[arg-type]
        self._execute, self._commit = self.loop._execute, self.loop._commit
        self._stop_before: str | None = None
        self._plan: tuple[Plan, Any] | None = None
        self._effects: Sequence[Effect] = ()
        self.loop._execute = self._stopping_execute  # type: ignore[method-assign]
        self.loop._commit = self._stopping_commit  # type: ignore[method-assign]

    @property
    def is_paused(self) -> bool:
        return self._plan is not None or bool(self._effects)

    def cycle(self, stop_before: str | None = None) -> None:
        self._stop_before = stop_before
        try:
            self.loop.cycle()
        except Paused:
            assert self.is_paused
        self._stop_before = None

    def wake(self) -> None:
        """Go on from where it was paused, as `TrainLoop.cycle` does."""
        if self._plan is not None:
            planned, self._plan = self._plan, None
            self._effects = self._execute(*planned)
        effects, self._effects = self._effects, ()
        self._commit(effects)

    def _stopping_execute(self, planned: Plan, bodies: Any) -> list[Effect]:
        if self._stop_before == "execute":
            self._plan = (planned, bodies)
            raise Paused
        return self._execute(planned, bodies)

    def _stopping_commit(self, effects: Sequence[Effect]) -> bool:
        if effects and self._stop_before == "commit":
            self._effects = effects
            raise Paused
        return self._commit(effects)


class LogAndLease(RuleBasedStateMachine):
    """Two clients, two workers."""

    migrated: ClassVar[Path]

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.database = Database(f"sqlite:///{shutil.copy(self.migrated, Path(self.folder.name) / 'tinworks.db')}")
        audit.begin(self.database)
        values = {"claim_interval_s": 1e-6, "snapshot_operations": 10_000}
        self.lab = Lab(self.database, Path(self.folder.name), **values)
        self.told: dict[str, Told] = {}
        self.sent: list[dict[int, int]] = [{}, {}]
        """Of each run: sequence id → the number that a `forward_backward` adds, 0 for a step."""
        self.deaths = 0

    @initialize()
    def begin(self) -> None:
        self.clients: list[Client] = [self.lab.client(rank=1, seed=seed) for seed in (1, 2)]
        self.workers = [Stepper(self.lab) for _ in range(2)]

    def teardown(self) -> None:
        if hasattr(self, "workers"):
            self.finish()
        self.lab.close()
        self.database.dispose()
        self.folder.cleanup()

    # -- clients

    @rule(run=RUNS, ahead=st.sampled_from([0, 0, 0, 1, 2]), is_step=st.booleans(), number=st.integers(1, 60))
    def submit(self, run: int, ahead: int, is_step: bool, number: int) -> None:
        """The next request that is missing, or one that comes too early."""
        missing = (seq_id for seq_id in range(1, 10**6) if seq_id not in self.sent[run])
        seq_id = [next(missing) for _ in range(ahead + 1)][-1]
        self._send(run, seq_id, 0 if is_step else number)

    @rule(run=RUNS, choose=st.randoms(use_true_random=False))
    def repeat(self, run: int, choose: Any) -> None:
        """A request that was sent before, as a client sends it again whose answer was lost."""
        if self.sent[run]:
            seq_id = choose.choice(sorted(self.sent[run]))
            self._send(run, seq_id, self.sent[run][seq_id])

    def _send(self, run: int, seq_id: int, number: int) -> None:
        client = self.clients[run]
        if number:
            client.send([Datum(np.array([number], np.int32), {"target_tokens": np.array([1])})], seq_id=seq_id)
        else:
            client.optim_step(seq_id=seq_id)
        self.sent[run][seq_id] = number

    # -- workers

    def _awake(self, worker: int) -> Stepper | None:
        stepper = self.workers[worker]
        return None if stepper.is_paused else stepper

    @rule(worker=WORKERS, stop_before=st.sampled_from([None, None, "execute", "commit"]))
    def cycle(self, worker: int, stop_before: str | None) -> None:
        """A turn, or the first part of one."""
        if stepper := self._awake(worker):
            stepper.cycle(stop_before)

    @rule(worker=WORKERS)
    def wake(self, worker: int) -> None:
        """A paused worker goes on: what it does for runs that it has lost leaves no trace."""
        stepper = self.workers[worker]
        if not stepper.is_paused:
            return
        lost = {model_id for model_id in stepper.loop._slots if not self._holds(stepper.loop, model_id)}
        before = {client.model_id: client.row.applied_seq for client in self.clients}
        stepper.wake()
        for client in self.clients:
            if client.model_id in lost:
                assert client.row.applied_seq == before[client.model_id]

    def _holds(self, loop: TrainLoop, model_id: str) -> bool:
        with self.database.read() as session:
            run = session.get_one(Run, model_id)
        return run.worker_id == loop._worker_id and run.epoch == loop._slots[model_id].epoch

    @rule(worker=WORKERS)
    def leases_run_out(self, worker: int) -> None:
        """What time does while a worker is paused, or cut off from the database."""
        self.lab.expire(self.workers[worker].loop)

    @rule(worker=WORKERS)
    def leases_are_renewed(self, worker: int) -> None:
        """What a worker's second thread does, also while the first one computes."""
        with self.database.write() as session:
            lease.renew(session, worker_id=self.workers[worker].loop._worker_id, lease_s=3600)

    @rule(worker=WORKERS)
    def die(self, worker: int) -> None:
        """A worker dies, wherever it was, and another one starts in its place."""
        self.lab.kill(self.workers[worker].loop)
        self.workers[worker] = Stepper(self.lab)
        self.deaths += 1

    @rule(worker=WORKERS)
    def stop(self, worker: int) -> None:
        """A worker gives everything back, as one that is told to stop."""
        if stepper := self._awake(worker):
            stepper.loop.hand_over()

    @rule(worker=WORKERS, run=RUNS)
    def snapshot(self, worker: int, run: int) -> None:
        """A recovery snapshot is written, also by a worker that has lost the run."""
        slot = self.workers[worker].loop._slots.get(self.clients[run].model_id)
        if slot is not None and slot.state is not None and self._awake(worker):
            self.workers[worker].loop._writer.write_now(slot)

    @rule(worker=WORKERS, place=st.sampled_from(["finish", "advance"]))
    def commit_is_refused(self, worker: int, place: str) -> None:
        """The database breaks off a commit in its middle."""
        stepper = self._awake(worker)
        if stepper is None:
            return
        module: Any = {"finish": log, "advance": lease}[place]

        def refuse(*args: Any, **options: Any) -> Any:
            raise OperationalError("UPDATE", {}, Exception("database is locked"))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, place, refuse)
            try:
                stepper.cycle()
            except OperationalError:
                stepper.loop._residents.drop_all()

    # -- what always holds

    @invariant()
    def what_was_told_is_right_and_never_changes(self) -> None:
        for run, client in enumerate(getattr(self, "clients", [])):
            applied = client.row.applied_seq
            expected = Expected()
            for seq_id in range(applied + 1):
                row = client.operation(seq_id)
                assert row.state != log.ACCEPTED, f"{seq_id} was passed over"
                told = (row.state, row.result, row.error)
                assert self.told.setdefault(row.request_id, told) == told
                if seq_id and client.operation(0).state == log.DONE:
                    self._check(client, row, self.sent[run][seq_id], expected)
                elif row.state == log.FAILED:  # the creation was given up, and all that comes after fails
                    assert self.deaths >= MAX_CRASHES, row.error
                else:
                    assert seq_id == 0
            for seq_id in self.sent[run].keys() - range(applied + 1):
                assert client.operation(seq_id).state == log.ACCEPTED, f"{seq_id} came before its turn"

    def _check(self, client: Client, row: Operation, number: int, expected: Expected) -> None:
        if row.error_category == "server":
            assert self.deaths >= MAX_CRASHES, row.error  # it was given up
            if number:
                expected.failed += 1
            else:
                expected.clear()
        elif number:
            assert client.output(row.seq_id).metrics["loss:sum"] == expected.add(number)
        elif expected.summed:
            assert client.metrics(row.seq_id)["value"] == expected.step()
        elif expected.failed:
            assert client.error(row.seq_id)[0] == "user"
            expected.clear()
        else:
            assert client.metrics(row.seq_id)["grad_norm"] == 0

    def finish(self) -> None:
        """In the end all is paused no longer, nobody dies any more, and what can be done is done, once."""
        for worker in range(2):
            self.wake(worker)
        with self.database.write() as session:
            session.execute(update(Run).values(worker_id=None, lease_expires_at=None))
        last = Stepper(self.lab)
        goal = {client.model_id: self._contiguous(run) for run, client in enumerate(self.clients)}

        def done() -> bool:
            last.cycle()
            return all(client.row.applied_seq == goal[client.model_id] for client in self.clients)

        wait_for(done, 20)
        self.what_was_told_is_right_and_never_changes()
        for client in self.clients:
            audit.assert_exactly_once(self.database, client.model_id, goal[client.model_id])

    def _contiguous(self, run: int) -> int:
        return next(seq_id for seq_id in range(1, 10**6) if seq_id not in self.sent[run]) - 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_everything_takes_effect_once_and_in_order(migrated_sqlite: Path) -> None:
    class Machine(LogAndLease):
        migrated = migrated_sqlite

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=20, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
