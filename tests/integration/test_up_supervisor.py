"""The supervisor behind `tinworks up`, with small programs for children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.up import CannotStart, network
from app.up.child import ChildSpec
from app.up.data_dir import DataDir
from app.up.signals import SAME_REQUEST_S, Signals
from app.up.supervisor import StopRequested, Supervisor

SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")
STUBBORN = (
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)",
)
PARENT = (
    sys.executable,
    "-c",
    f"import subprocess, time; print(subprocess.Popen({list(SLEEP)!r}).pid, flush=True); time.sleep(600)",
)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for(condition: Callable[[], object], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


class Scene:
    """A supervisor in this process, and what it said."""

    def __init__(self, signals: Signals, root: Path) -> None:
        self.run_dir, self.log_dir = root / "run", root / "log"
        self.run_dir.mkdir()
        self.log_dir.mkdir()
        self.said: list[str] = []
        self.signals = signals
        self.supervisor = Supervisor(signals, run_dir=self.run_dir, log_dir=self.log_dir, say=self.said.append)

    def pid(self, role: str) -> int:
        try:
            return int((self.run_dir / f"{role}.pid").read_text())
        except FileNotFoundError:
            return 0

    def log(self, role: str) -> str:
        return (self.log_dir / f"{role}.log").read_text()

    def until(self, condition: Callable[[], object]) -> None:
        assert self.supervisor.wait_until(lambda: bool(condition()), timeout_s=15.0)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with Signals() as signals:
        result = Scene(signals, tmp_path)
        yield result
        signals.stop_requests = 2  # at once
        result.supervisor.stop()


def test_a_killed_child_is_started_again_under_its_pid_file(scene: Scene) -> None:
    child = scene.supervisor.start(ChildSpec("web", SLEEP))
    first = scene.pid("web")
    assert first == child.pid
    os.kill(first, signal.SIGKILL)
    scene.until(lambda: scene.pid("web") not in (0, first))
    assert alive(scene.pid("web"))
    assert "web ended (SIGKILL)" in scene.said[0]
    assert "starting it again" in scene.said[0]


def test_the_children_of_a_dead_child_are_gone_before_it_starts_again(scene: Scene) -> None:
    scene.supervisor.start(ChildSpec("beat", PARENT))
    scene.until(lambda: scene.log("beat").strip())
    grandchild = int(scene.log("beat"))
    first = scene.pid("beat")
    os.kill(first, signal.SIGKILL)
    scene.until(lambda: scene.pid("beat") not in (0, first))
    wait_for(lambda: not alive(grandchild))


def test_a_child_that_fails_shows_the_end_of_its_log_and_waits_longer_each_time(scene: Scene) -> None:
    failing = (sys.executable, "-c", "import sys; print('no such model: tinny'); sys.exit(3)")
    scene.supervisor.start(ChildSpec("worker", failing))
    scene.until(lambda: sum("worker ended (exit 3)" in line for line in scene.said) == 3)
    delays = [line.rpartition(" again in ")[2] for line in scene.said if "again in" in line]
    assert delays == ["0.2 s.", "0.4 s.", "0.8 s."]
    assert scene.said.count("  | no such model: tinny") == 1


def test_a_command_that_does_not_exist_is_reported(scene: Scene) -> None:
    scene.supervisor.start(ChildSpec("redis", ("no-such-program-of-ours",)))
    scene.until(lambda: "  | cannot run no-such-program-of-ours: No such file or directory" in scene.said)


def test_steps_run_to_their_end_and_a_failed_one_stops_the_start(scene: Scene) -> None:
    scene.supervisor.run_all([ChildSpec("migrate", (sys.executable, "-c", "pass"))])
    assert scene.pid("migrate") == 0
    with pytest.raises(CannotStart, match=r"migrate failed \(exit 1\)"):
        scene.supervisor.run_all([ChildSpec("migrate", (sys.executable, "-c", "raise SystemExit('locked')"))])
    assert "  | locked" in scene.said


def test_each_child_has_a_session_of_its_own_and_the_environment_it_was_given(scene: Scene) -> None:
    show = "import os, time; print(os.environ['COLOUR'], os.getsid(0) == os.getpid(), flush=True); time.sleep(600)"
    scene.supervisor.start(ChildSpec("web", (sys.executable, "-c", show), {"COLOUR": "green"}))
    scene.until(lambda: scene.log("web") == "green True\n")


def test_stopping_ends_everything_and_redis_last(tmp_path: Path) -> None:
    farewell = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: (print("bye", time.monotonic(), flush=True), sys.exit()))
        print("up", flush=True)
        time.sleep(600)
    """
    command = (sys.executable, "-c", textwrap.dedent(farewell))
    with Signals() as signals:
        scene = Scene(signals, tmp_path)
        scene.supervisor.start(ChildSpec("redis", command, stops_last=True))
        scene.supervisor.start(ChildSpec("web", command))
        scene.until(lambda: "up" in scene.log("redis") and "up" in scene.log("web"))
        pids = [scene.pid("redis"), scene.pid("web")]
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(StopRequested):
            scene.supervisor.tick(10.0)
        scene.supervisor.stop()
    assert not any(map(alive, pids))
    assert list(scene.run_dir.iterdir()) == []
    ends = [float(scene.log(role).split()[-1]) for role in ("web", "redis")]
    assert ends == sorted(ends)


def test_what_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.up.supervisor.STOP_GRACE_S", 0.3)
    with Signals() as signals:
        scene = Scene(signals, tmp_path)
        scene.supervisor.start(ChildSpec("worker", STUBBORN))
        scene.until(lambda: "deaf" in scene.log("worker"))
        pid = scene.pid("worker")
        scene.supervisor.stop()
    assert not alive(pid)
    assert scene.said == ["worker did not stop in time: killed."]


SCRIPT = """
import pathlib, sys
from app.up.child import ChildSpec
from app.up.data_dir import DataDir
from app.up.signals import Signals
from app.up.supervisor import StopRequested, Supervisor

data = DataDir(pathlib.Path(sys.argv[1]))
with data.locked(), Signals() as signals:
    supervisor = Supervisor(signals, run_dir=data.run, log_dir=data.log, say=lambda line: print(line, flush=True))
    try:
        supervisor.start(ChildSpec("stubborn", {stubborn!r}))
        supervisor.start(ChildSpec("parent", {parent!r}))
        while True:
            supervisor.tick(60)
    except StopRequested:
        print("stopping", flush=True)
    finally:
        supervisor.stop()
"""


@pytest.fixture
def script(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A supervisor in a process of its own, and the pids of its stubborn child, its parent child, the grandchild."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(stubborn=STUBBORN, parent=PARENT), str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    logs = [tmp_path / "log" / f"{role}.log" for role in ("stubborn", "parent")]
    wait_for(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs))
    pids = [int((tmp_path / "run" / f"{role}.pid").read_text()) for role in ("stubborn", "parent")]
    pids.append(int(logs[1].read_text()))
    yield process, pids
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_a_second_ctrl_c_does_not_wait(script: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = script
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "stopping\n"
    time.sleep(2 * SAME_REQUEST_S)  # people are not quicker
    process.send_signal(signal.SIGINT)
    assert process.wait(4) == 0
    assert time.monotonic() - began < 4
    wait_for(lambda: not any(map(alive, pids)))


def test_one_request_to_stop_that_comes_twice_is_one(scene: Scene) -> None:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(StopRequested):
        scene.supervisor.tick(10.0)
    assert scene.signals.stop_requests == 1


def test_nothing_outlives_a_killed_supervisor(script: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = script
    process.kill()
    wait_for(lambda: not any(map(alive, pids)))


def test_a_second_up_on_the_folder_is_refused_and_names_the_first(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    with data.locked():
        assert (data.run / "up.pid").read_text() == f"{os.getpid()}\n"
        with pytest.raises(CannotStart, match=rf"pid {os.getpid()}\) runs on"), data.locked():
            pass
    assert not (data.run / "up.pid").exists()
    with data.locked():
        pass


def test_pid_files_of_a_killed_up_are_removed(tmp_path: Path) -> None:
    data = DataDir(tmp_path)
    data.run.mkdir()
    (data.run / "web.pid").write_text("1\n")
    with data.locked():
        assert [path.name for path in data.run.glob("*.pid")] == ["up.pid"]


def test_a_taken_port_is_refused_with_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotStart, match=rf"Port {port} on 127.0.0.1 is taken"):
            network.check_port("127.0.0.1", port)
    network.check_port("127.0.0.1", network.free_port())
