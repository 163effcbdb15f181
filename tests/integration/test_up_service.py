"""`tinworks up` itself: the real processes, killed and stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
READY_LINES = {
    "redis": "Ready to accept connections",
    "web": "Application startup complete",
    "worker": " ready.",
    "beat": " ready.",
}
"""What each process logs once per start."""
READY_S = 90.0


def wait_for(condition: Callable[[], object], timeout_s: float = READY_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def up(data_dir: Path, *arguments: str) -> subprocess.Popen[str]:
    """`tinworks up` with an environment that says nothing about Tinworks; its terminal is the file `terminal`."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("TINWORKS_")}
    for name in ("DATABASE_URL", "REDIS_URL", "PORT"):
        mine.pop(name, None)
    with (data_dir / "terminal").open("a") as terminal:
        return subprocess.Popen(
            [sys.executable, "-m", "app.cli", "up", "--data-dir", str(data_dir), *arguments],
            cwd=ROOT,
            env={**mine, "TINWORKS_TORCH_THREADS": "1"},
            stdout=terminal,
            stderr=subprocess.STDOUT,
            text=True,
        )


class Service:
    """A running service, seen from outside."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.process = up(data_dir, "--port", "0")
        self.family: set[psutil.Process] = set()

    @property
    def terminal(self) -> str:
        return (self.data_dir / "terminal").read_text()

    @property
    def url(self) -> str:
        match = re.search(r"Tinworks is ready: (\S+)  models: tiny", self.terminal)
        return match[1] if match else ""

    def pid(self, role: str) -> int:
        try:
            return int((self.data_dir / "run" / f"{role}.pid").read_text())
        except FileNotFoundError:
            return 0

    def starts(self, role: str) -> int:
        return (self.data_dir / "log" / f"{role}.log").read_text().count(READY_LINES[role])

    def health(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.url or self.process.poll() is not None)
        assert self.url, self.terminal
        wait_for(lambda: self.health() == 200)
        self.family = set(psutil.Process(self.process.pid).children(recursive=True))

    def survivors(self) -> list[psutil.Process]:
        return [one for one in self.family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(tmp_path_factory.mktemp("up"))
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.process.terminate()
        running.process.wait(15)


def test_every_process_has_a_pid_file(service: Service) -> None:
    assert service.pid("up") == service.process.pid
    for role in READY_LINES:
        assert psutil.Process(service.pid(role)).is_running()


def test_a_second_up_on_the_folder_or_the_port_is_refused(service: Service, tmp_path: Path) -> None:
    second = up(service.data_dir, "--port", "0")
    assert second.wait(15) == 1
    assert f"(pid {service.process.pid}) runs on" in service.terminal
    port = service.url.rpartition(":")[2]
    third = up(tmp_path, "--port", port)
    assert third.wait(15) == 1
    assert f"Port {port} on 127.0.0.1 is taken" in (tmp_path / "terminal").read_text()
    assert service.health() == 200


@pytest.mark.parametrize("role", READY_LINES)
def test_the_service_heals_when_a_process_is_killed(service: Service, role: str) -> None:
    killed, starts = service.pid(role), service.starts(role)
    os.kill(killed, signal.SIGKILL)
    wait_for(lambda: service.pid(role) not in (0, killed))
    wait_for(lambda: service.starts(role) == starts + 1)
    wait_for(lambda: service.health() == 200)
    assert f"{role} ended (SIGKILL)" in service.terminal


def test_ctrl_c_stops_everything_within_seconds(service: Service) -> None:
    service.wait_until_ready()
    assert len(service.family) >= len(READY_LINES)
    began = time.monotonic()
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(15) == 0
    assert time.monotonic() - began < 12
    assert service.survivors() == []
    assert list((service.data_dir / "run").glob("*.pid")) == []
    assert service.terminal.endswith("Stopped.\n")


def test_nothing_outlives_a_killed_up_and_it_starts_again_on_the_folder(tmp_path: Path) -> None:
    first = Service(tmp_path)
    first.wait_until_ready()
    first.process.kill()
    first.process.wait()
    wait_for(lambda: not first.survivors(), timeout_s=10)
    (tmp_path / "terminal").unlink()
    second = Service(tmp_path)
    try:
        second.wait_until_ready()
    finally:
        second.process.terminate()
        assert second.process.wait(15) == 0
