"""`celery -A workers worker`: what people type, what is refused, and that a janitor needs no torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from celery import Celery
from sqlalchemy import select

from app.checkpoints.models import Checkpoint
from app.db import Database, utc_now
from tests.factories import add_checkpoint, new_run
from tests.services import wait_for

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(redis_url: str, sqlite_url: str, tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "REDIS_URL": redis_url, "DATABASE_URL": sqlite_url, "TINWORKS_DATA_DIR": str(tmp_path)}


def worker(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "celery", "-A", "workers", "worker", *arguments]


REFUSED = {
    "no queue": ((), "say what this worker is for: -Q train"),
    "unknown queue": (("-Q", "nonsense"), "say what this worker is for: -Q train"),
    "one unknown queue": (("-Q", "janitor,nonsense"), "say what this worker is for: -Q train"),
    "prefork": (("-Q", "train", "--pool", "prefork"), "run in the threads pool, not in prefork"),
    "prefork, short": (("-Q", "janitor", "-P", "prefork"), "run in the threads pool, not in prefork"),
    "prefork, joined": (("-Q", "janitor", "--pool=prefork"), "run in the threads pool, not in prefork"),
    "no model": (("-Q", "train"), "TINWORKS_BASE_MODEL is not set"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_start_that_cannot_work_is_refused_with_what_to_do(environment: dict[str, str], case: str) -> None:
    arguments, words = REFUSED[case]
    environment.pop("TINWORKS_BASE_MODEL", None)
    done = subprocess.run(
        worker(*arguments), cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def janitor(environment: dict[str, str], folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "janitor.log").open("wb") as output:
        process = subprocess.Popen(
            worker("-Q", "janitor", "--pool", "solo", *arguments),
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


@pytest.fixture
def tidied(sqlite_url: str) -> Iterator[Callable[[], bool]]:
    """There is a checkpoint that has expired; returns whether somebody has tidied it away."""
    database = Database(sqlite_url)
    run = new_run(database)
    with database.write() as session:
        add_checkpoint(session, run, expires_at=utc_now() - timedelta(hours=1))

    def gone() -> bool:
        with database.read() as session:
            return session.scalar(select(Checkpoint.id)) is None

    yield gone
    database.dispose()


def test_a_janitor_tidies_and_loads_no_torch(
    environment: dict[str, str], tidied: Callable[[], bool], redis_url: str, tmp_path: Path
) -> None:
    with janitor(environment, tmp_path) as process:
        Celery(broker=redis_url, set_as_current=False).send_task("tinworks.tidy", queue="janitor")
        wait_for(tidied)
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
        assert "psycopg" in mapped or "sqlite3" in mapped  # we look at the right process
        assert "torch" not in mapped


@pytest.mark.slow  # its first beat comes after 30 s
def test_beat_schedules_and_executes_in_one_process(
    environment: dict[str, str], tidied: Callable[[], bool], tmp_path: Path
) -> None:
    with janitor(environment, tmp_path, "-B"):
        wait_for(tidied, timeout_s=60, every_s=0.1)
    assert not list(ROOT.glob("celerybeat-schedule*"))


STRUCK = """
import os, signal, sys
from concurrent.futures import ThreadPoolExecutor
from celery.__main__ import main

spawn = ThreadPoolExecutor._adjust_thread_count

def struck(pool):  # the main thread holds the pool's lock here
    os.kill(os.getpid(), signal.SIGQUIT)
    spawn(pool)

ThreadPoolExecutor._adjust_thread_count = struck
sys.argv[1:] = ["-A", "workers", "worker", "-Q", "janitor", "--without-mingle"]
main()
"""


def test_a_worker_ends_though_sigquit_comes_while_it_hands_a_task_to_its_threads(
    environment: dict[str, str], tidied: Callable[[], bool], redis_url: str
) -> None:
    Celery(broker=redis_url, set_as_current=False).send_task("tinworks.tidy", queue="janitor")
    done = subprocess.run([sys.executable, "-c", STRUCK], cwd=ROOT, env=environment, timeout=60, check=False)
    assert done.returncode == 0
    assert tidied()  # the task that it was about was done nevertheless


PROBE = """
import sys
import app.main, app.cli, workers.celery, workers.janitor, workers.tasks
app.main.create_app()
print([name for name in ("torch", "transformers") if name in sys.modules])
"""


def test_neither_the_api_nor_the_tasks_import_torch(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
