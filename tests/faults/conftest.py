"""Real workers with faults, and the log that they work at."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import select, update

from app.db import Database
from app.fleet.models import Worker
from app.runs.models import Run
from tests.faults import audit
from tests.services import dies_with_us, wait_for
from tests.unit.workers.train.train_lab import Client, Lab
from workers.model.base import BaseModel
from workers.model.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
LEASE_S = 1.5
READY_S = 90.0


class RealWorker:
    """`celery … worker -Q train` in a process of its own, with a fault (`worker`)."""

    def __init__(self, database: Database, environment: dict[str, str], log: Path) -> None:
        self._database = database
        self._log = log
        command = [sys.executable, "-m", "celery", "-A", "tests.faults.worker", "worker", "-Q", "train"]
        command += ["--without-mingle", "--without-gossip", "--without-heartbeat"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                dies_with_us(command), cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    @property
    def row(self) -> Worker | None:
        """Its row; None while it has none."""
        with self._database.read() as session:
            return session.scalar(select(Worker).where(Worker.pid == self.process.pid))

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self) -> None:
        self.wait(lambda: self.row is not None)

    def wait(self, condition: Callable[[], object]) -> None:
        """Until the condition holds or the worker has ended, which fails the test."""
        wait_for(lambda: condition() or not self.is_alive, READY_S)
        assert condition(), self.log

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        if self.is_alive:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    made = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(made)
    return made


@pytest.fixture
def real_lab(sqlite_url: str, tmp_path: Path, tiny_model: Path) -> Iterator[Lab]:
    """The log of a service for the tiny model, with an audit; loops in this process compute with that model too."""
    database = Database(sqlite_url)
    audit.begin(database)
    made = Lab(database, tmp_path)
    made.base = BaseModel.load(tiny_model)
    yield made
    made.close()
    database.dispose()


StartWorker = Callable[..., RealWorker]


@pytest.fixture
def start_worker(real_lab: Lab, redis_url: str, tmp_path: Path, tiny_model: Path) -> Iterator[StartWorker]:
    """Starts a real worker with these variables in its environment."""
    settings = {
        "DATABASE_URL": real_lab.database.url,
        "REDIS_URL": redis_url,
        "TINWORKS_DATA_DIR": str(tmp_path),
        "TINWORKS_BASE_MODEL": f"tiny={tiny_model}",
        "TINWORKS_TORCH_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "TINWORKS_CLAIM_INTERVAL_S": "0.05",
        "TINWORKS_LEASE_S": str(LEASE_S),
        "TINWORKS_SNAPSHOT_OPERATIONS": "4",
    }
    started: list[RealWorker] = []

    def start(**variables: str) -> RealWorker:
        log = tmp_path / f"worker.{len(started)}.log"
        started.append(RealWorker(real_lab.database, {**os.environ, **settings, **variables}, log))
        return started[-1]

    yield start
    for worker in started:
        worker.end()


def wait_applied(client: Client, *workers: RealWorker) -> None:
    """Until all that the client has sent is done. Fails when all of the workers have ended."""

    def done() -> bool:
        return client.row.applied_seq == client.next_seq - 1

    wait_for(lambda: done() or not any(worker.is_alive for worker in workers), READY_S)
    assert done(), "\n".join(worker.log[-3000:] for worker in workers)


def free(lab: Lab, client: Client) -> None:
    """Take a run from whoever holds it; its worker has ended."""
    with lab.database.write() as session:
        session.execute(update(Run).where(Run.id == client.model_id).values(worker_id=None, lease_expires_at=None))
