"""The folder of one `tinworks up`: its sub-folders, and the lock that keeps a second one out."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.up import CannotStart
from app.up.child import write_pid


@dataclass(frozen=True)
class DataDir:
    """Where everything of one service lies."""

    root: Path

    @property
    def run(self) -> Path:
        """Pid files."""
        return self.root / "run"

    @property
    def log(self) -> Path:
        """One log per role."""
        return self.root / "log"

    @property
    def redis(self) -> Path:
        """The working directory of Redis, which writes nothing."""
        return self.root / "redis"

    @property
    def tiny_model(self) -> Path:
        """The model that is made when none is named."""
        return self.root / "models" / "tiny"

    @property
    def database_url(self) -> str:
        """The SQLite database that is used when DATABASE_URL names none."""
        return f"sqlite:///{self.root / 'tinworks.db'}"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Own the folder: `run/up.pid` is there, and stale pid files of others are not.

        Raises:
            CannotStart: another `tinworks up` owns it, or it cannot be written to.
        """
        try:
            for folder in (self.run, self.log, self.redis):
                folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.run / "up.lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CannotStart(f"Cannot use the data folder {self.root}: {error.strerror or error}.") from error
        try:
            self._take(lock)
            yield
            (self.run / "up.pid").unlink(missing_ok=True)
        finally:
            os.close(lock)

    def _take(self, lock: int) -> None:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid_file = self.run / "up.pid"
            pid = pid_file.read_text().strip() if pid_file.exists() else "unknown"
            raise CannotStart(
                f"Another `tinworks up` (pid {pid}) runs on {self.root}. Stop it, or choose another --data-dir."
            ) from error
        for stale in self.run.glob("*.pid*"):
            stale.unlink(missing_ok=True)
        write_pid(self.run / "up.pid", os.getpid())
