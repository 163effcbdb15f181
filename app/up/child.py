"""One child process of `tinworks up`: its command, its log file, its pid file, its life so far."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from app.up import exec_child
from app.up.guard import Guard, kill_group

FIRST_DELAY_S = 0.2
LONGEST_DELAY_S = 5.0
STABLE_AFTER_S = 10.0
LOG_LIMIT_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ChildSpec:
    """What to run. `role` names its pid and log files; `environment` is added to ours."""

    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    stops_last: bool = False
    """Whether the others need it to stop cleanly (Redis)."""


class Child:
    """A process in a session and process group of its own, started as often as it takes."""

    def __init__(self, spec: ChildSpec, *, run_dir: Path, log_dir: Path, guard: Guard) -> None:
        self.spec = spec
        self.failures = 0
        """Deaths in a row without STABLE_AFTER_S of life between them."""
        self.log_path = log_dir / f"{spec.role}.log"
        self._pid_path = run_dir / f"{spec.role}.pid"
        self._guard = guard
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """The process id, which is also that of its group; None before `start` and after `forget`."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """The exit status of the last start (negative: a signal), None while it runs."""
        return self._process.poll() if self._process else None

    @property
    def uptime_s(self) -> float:
        """Seconds since the last start."""
        return time.monotonic() - self._started

    def start(self) -> None:
        """Run the command; its output is appended to the log."""
        self._open_log()
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), *self.spec.command],
                env={**os.environ, **self.spec.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._started = time.monotonic()
        self._guard.add(self._process.pid)
        write_pid(self._pid_path, self._process.pid)

    def record_death(self) -> float:
        """Kill what is left of the dead child's group. Returns the seconds to wait before it is started again."""
        self.failures = 1 if self.uptime_s >= STABLE_AFTER_S else self.failures + 1
        self.forget()
        return min(FIRST_DELAY_S * 2.0 ** (self.failures - 1), LONGEST_DELAY_S)

    def terminate(self) -> None:
        """Ask the process to end (its own children are its business)."""
        if self._process and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def forget(self) -> None:
        """Kill the whole group, wait for the process, remove the pid file."""
        if self._process is not None:
            kill_group(self._process.pid)
            self._process.wait()
            self._guard.discard(self._process.pid)
            self._process = None
        self._pid_path.unlink(missing_ok=True)

    def last_lines(self, count: int) -> list[str]:
        """The end of what it wrote to its log since its last start."""
        with self.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - 16384))
            text = log.read().decode(errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]

    def _open_log(self) -> None:
        if self.log_path.exists() and self.log_path.stat().st_size > LOG_LIMIT_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))


def write_pid(path: Path, pid: int) -> None:
    """Write a pid file atomically: a reader never sees half a number."""
    partial = path.with_suffix(".pid.new")
    partial.write_text(f"{pid}\n")
    partial.replace(path)


def describe_exit(returncode: int) -> str:
    """An exit status in words."""
    if returncode >= 0:
        return f"exit {returncode}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
