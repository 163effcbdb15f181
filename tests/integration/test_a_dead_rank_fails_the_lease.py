"""A worker of several ranks as people start it: it lives and dies as one, and its runs go on elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from app.db import Database
from tests.services import dies_with_us, wait_for
from tests.unit.workers.train.train_lab import Client, Lab, assert_close, state_of
from workers.model.base import BaseModel
from workers.model.ranks.start import LOST_EXIT_CODE
from workers.model.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
LEASE_S = 2.0


class Worker:
    """`celery -A workers worker -Q train` on two ranks."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.log = log
        command = [sys.executable, "-m", "celery", "-A", "workers", "worker", "-Q", "train"]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                dies_with_us(command), cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

    def ranks(self) -> list[psutil.Process]:
        """The processes of its other ranks."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "workers.model.ranks" in child.cmdline()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(made)
    return made


@pytest.fixture
def tiny_lab(sqlite_url: str, tmp_path: Path, model: Path) -> Iterator[Lab]:
    """The log of a service for the tiny model."""
    database = Database(sqlite_url)
    made = Lab(database, tmp_path)
    made.base = BaseModel.load(model)
    yield made
    made.close()
    database.dispose()


@pytest.fixture
def worker(sqlite_url: str, redis_url: str, tmp_path: Path, model: Path) -> Iterator[Worker]:
    settings = {
        "DATABASE_URL": sqlite_url,
        "REDIS_URL": redis_url,
        "TINWORKS_DATA_DIR": str(tmp_path),
        "TINWORKS_BASE_MODEL": f"tiny={model}",
        "TINWORKS_TRAIN_RANKS": "2",
        "TINWORKS_TORCH_THREADS": "1",
        "TINWORKS_CLAIM_INTERVAL_S": "0.05",
        "TINWORKS_LEASE_S": str(LEASE_S),
    }
    started = Worker({**os.environ, **settings}, tmp_path / "worker.log")
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()


def wait_for_seq(client: Client, seq_id: int, worker: Worker) -> None:
    wait_for(lambda: client.row.applied_seq >= seq_id or worker.process.poll() is not None, 90.0)
    assert client.row.applied_seq >= seq_id, worker.log.read_text()


def test_another_worker_finishes_what_a_worker_with_a_dead_rank_began(tiny_lab: Lab, worker: Worker) -> None:
    client = tiny_lab.client(rank=4, seed=1)
    _, last = client.train(1)
    wait_for_seq(client, last, worker)
    last = client.forward_backward(2)
    wait_for_seq(client, last, worker)
    (rank,) = worker.ranks()
    rank.kill()
    assert worker.process.wait(30) == LOST_EXIT_CODE, worker.log.read_text()
    last = client.optim_step()
    solo = tiny_lab.worker()

    def finished() -> bool:
        tiny_lab.work(solo)
        return client.row.applied_seq == last

    wait_for(finished, 3 * LEASE_S + 10)
    quiet = tiny_lab.client(rank=4, seed=1)
    quiet.train(1)
    quiet.train(2)
    tiny_lab.work(solo)
    assert_close(state_of(solo, client), state_of(solo, quiet))


@pytest.mark.slow
def test_a_worker_that_is_told_to_stop_ends_its_ranks_and_keeps_its_runs(tiny_lab: Lab, worker: Worker) -> None:
    client = tiny_lab.client(rank=4, seed=1)
    _, last = client.train(1)
    wait_for_seq(client, last, worker)
    ranks = worker.ranks()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0, worker.log.read_text()
    assert not any(rank.is_running() for rank in ranks)
    assert client.row.worker_id is None and client.row.recovery_snapshot_id is not None


@pytest.mark.slow
def test_ranks_die_with_their_worker(tiny_lab: Lab, worker: Worker) -> None:
    client = tiny_lab.client(rank=4, seed=1)
    wait_for_seq(client, 0, worker)
    ranks = worker.ranks()
    assert ranks
    worker.process.kill()
    wait_for(lambda: not any(rank.is_running() for rank in ranks), 10.0)
