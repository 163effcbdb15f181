"""Kills what `tinworks up` leaves behind when it dies by SIGKILL: `exec_child` ends its children, this their children.

`Guard` is the parent's side; run as a script, this file is the guard itself: it reads `+PGID` and `-PGID` lines from
its standard input, and when that closes, kills every process group that is still listed. Imports the standard library
only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


class Guard:
    """A process that outlives this one by an instant and kills the process groups that it was told of."""

    def __init__(self) -> None:
        self._groups: set[int] = set()
        self._process: subprocess.Popen[bytes] | None = None

    def add(self, pgid: int) -> None:
        """Kill this group when the current process is gone."""
        self._groups.add(pgid)
        self._tell(f"+{pgid}\n")

    def discard(self, pgid: int) -> None:
        """This group is gone: its number may come to belong to somebody else."""
        self._groups.discard(pgid)
        self._tell(f"-{pgid}\n")

    def close(self) -> None:
        """End the guard, which kills the groups that are left."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            self._process.wait()
        self._process = None

    def _tell(self, line: str) -> None:
        try:
            self._write(line)
        except OSError:  # somebody killed the guard: the new one is told of every group
            self._process = None
            self._write("".join(f"+{pgid}\n" for pgid in self._groups))

    def _write(self, text: str) -> None:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
            text = "".join(f"+{pgid}\n" for pgid in self._groups)
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()


def kill_group(pgid: int, signum: int = signal.SIGKILL) -> None:
    """Signal a process group; that it is gone, or only zombies, is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, signum)


def main() -> None:
    """The guard process."""
    groups: set[int] = set()
    for line in sys.stdin:
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for pgid in groups:
        kill_group(pgid)


if __name__ == "__main__":
    main()
