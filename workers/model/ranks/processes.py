"""The processes of the ranks on one host: started together, and together gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

from app.up import exec_child
from workers.model.ranks.placement import Placement

THREADS = "OMP_NUM_THREADS"
STOP_S = 20.0
GRACE_S = 1.0
"""If all ranks end of one cause, the first has so long to say it."""


class RankProcesses:
    """Ranks `first` … of this host as child processes. They die with the thread that makes this object, so that must be
    the main thread. `threads`: cores that each computes with.

    `on_death` is called from another thread, with the exit status, soon after one ends before `expect_end`.
    """

    def __init__(self, place: Placement, *, first: int, threads: int, on_death: Callable[[int], None]) -> None:
        self._ending = threading.Event()
        self._on_death = on_death
        self.processes = [self._start(place.neighbour(n), threads) for n in range(first, place.local_world)]
        self._watchers = [
            threading.Thread(target=self._watch, args=(process,), name="rank", daemon=True)
            for process in self.processes
        ]
        for watcher in self._watchers:
            watcher.start()

    @staticmethod
    def _start(place: Placement, threads: int) -> subprocess.Popen[bytes]:
        """In a session of its own: what a terminal sends to the worker is not for its ranks."""
        command = [sys.executable, "-m", "workers.model.ranks"]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", exec_child.__file__, str(os.getpid()), *command],
            env={**os.environ, **place.environment(), THREADS: str(threads)},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        status = process.wait()
        if not self._ending.wait(GRACE_S):
            self._on_death(status)

    def expect_end(self) -> None:
        """From now on a rank may end."""
        self._ending.set()

    def wait(self) -> list[int]:
        """Wait for all to end; returns their exit statuses."""
        for watcher in self._watchers:
            watcher.join()
        return [process.wait() for process in self.processes]

    def end(self) -> None:
        """Wait a while for all to end, then kill what is left."""
        self.expect_end()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
