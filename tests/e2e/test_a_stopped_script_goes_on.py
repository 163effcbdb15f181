"""A script stands still, as on a laptop that sleeps, until its session counts as silent and its run has left its slot;
then it goes on, and is told what it would have been told."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from app.runs.models import Run
from app.sessions.models import ClientSession
from tests.e2e.plain_script import STEPS
from tests.e2e.roles import ROOT, Deployment
from tests.services import RedisServer, dies_with_us

SILENCE_S = 6.0
"""Longer than a client that is there may go without being noted as seen."""
BEFORE = 5
"""Steps of the script before it stands still."""
EVICTED_S = 60.0
ROUND_EVERY_S = 0.5


class Script:
    """`plain_script` at work."""

    def __init__(self, base_url: str, key: str) -> None:
        command = [sys.executable, "-m", "tests.e2e.plain_script", base_url, f"tml-{key}"]
        self.process = subprocess.Popen(dies_with_us(command), cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """What it writes next; fails when it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, f"it ended with {self.process.wait()}"
        return line

    def losses(self, count: int) -> list[float]:
        """The next ones."""
        return [float(self.line()) for _ in range(count)]


@pytest.fixture
def deployment(tmp_path: Path, own_redis: RedisServer) -> Iterator[Deployment]:
    """A service in which sessions are soon silent."""
    folder = tmp_path / "data"
    running = Deployment(folder, database_url=f"sqlite:///{folder}/tinworks.db", redis_url=own_redis.url)
    running.environment |= {"TINWORKS_AUTH": "open", "TINWORKS_SESSION_SILENCE_S": str(SILENCE_S)}
    try:
        running.start()
        yield running
    finally:
        running.close()


@pytest.fixture
def scripts(deployment: Deployment) -> Iterator[tuple[Script, Script]]:
    """Two that begin at the same time."""
    look_around(deployment)  # silence counts only while the janitor sees the service up
    started = Script(deployment.base_url, "quiet"), Script(deployment.base_url, "sleeper")
    yield started
    for script in started:
        script.process.kill()
        script.process.communicate()


def look_around(deployment: Deployment) -> None:
    """Have the janitor make a round now: beat asks for one every 30 s."""
    with Celery(broker=deployment.environment["REDIS_URL"], set_as_current=False) as celery:
        celery.send_task("tinworks.tidy", queue="janitor")


def run_and_silence(deployment: Deployment, model_id: str) -> tuple[Run, object]:
    """A run, and since when its session is silent."""
    with deployment.database.read() as session:
        run = session.get_one(Run, model_id)
        return run, session.get_one(ClientSession, run.session_id).silent_since


def pass_silently(deployment: Deployment, model_id: str) -> Run:
    """Until the run is nobody's, and not before the silence was too long. Returns it as it is then."""
    begin = time.monotonic()
    while True:
        look_around(deployment)
        run, silent_since = run_and_silence(deployment, model_id)
        silent_s = time.monotonic() - begin
        if silent_s > SILENCE_S and silent_since is not None and run.worker_id is None:
            return run
        assert silent_s < EVICTED_S, f"{silent_since}, {run.worker_id}"
        time.sleep(ROUND_EVERY_S)


def test_a_script_that_was_stopped_until_its_run_was_evicted_goes_on(
    deployment: Deployment, scripts: tuple[Script, Script]
) -> None:
    quiet, sleeper = scripts
    model_id = sleeper.line()
    losses = sleeper.losses(BEFORE)
    sleeper.process.send_signal(signal.SIGSTOP)
    evicted = pass_silently(deployment, model_id)
    assert evicted.applied_seq < 2 * STEPS
    sleeper.process.send_signal(signal.SIGCONT)
    losses += sleeper.losses(STEPS - BEFORE)
    assert sleeper.process.wait(60) == 0
    quiet.line()
    assert losses == pytest.approx(quiet.losses(STEPS), rel=1e-4)
    run, silent_since = run_and_silence(deployment, model_id)
    assert run.epoch > evicted.epoch and silent_since is None
