"""A whole Tinworks service for tests: `tinworks up` in a folder of its own, and hands to hurt it with."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from app.settings import Settings
from app.storage.blobs import BlobStore, LocalBlobStore
from app.storage.s3 import open_bucket
from tests.e2e import stack

READY_TIMEOUT_S = 90.0


def free_port() -> int:
    """A TCP port of the loopback address that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(true: Callable[[], object], *, timeout_s: float, what: str) -> None:
    """Wait for a condition. Raises TimeoutError naming it."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if true():
            return
        time.sleep(0.02)
    raise TimeoutError(f"not within {timeout_s} s: {what}")


class Service:
    """A running `tinworks up`."""

    def __init__(self, data_dir: Path, *options: str, environment: dict[str, str] | None = None) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._options = options
        clean = {k: v for k, v in os.environ.items() if k not in ("DATABASE_URL", "REDIS_URL", "PORT")}
        clean = {k: v for k, v in clean.items() if not k.startswith("TINWORKS_")}
        clean |= {"TINWORKS_TORCH_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.database_url = f"sqlite:///{data_dir}/tinworks.db"
        if (servers := stack.current()) is not None:
            self.database_url = servers.new_database()
            clean |= servers.new_bucket() | {"DATABASE_URL": self.database_url}
        self._environment = clean | (environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start and wait until healthz answers 200."""
        command = [sys.executable, "-m", "app.cli", "up", "--port", str(self.port), "--data-dir", str(self.data_dir)]
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with (self.data_dir / "up.out").open("wb") as out:
            self._process = subprocess.Popen(
                [*command, *self._options], env=self._environment, stdout=out, stderr=subprocess.STDOUT
            )
        wait_until(lambda: self.is_healthy() or self._died(), timeout_s=READY_TIMEOUT_S, what="healthz answers 200")
        if self._died():
            raise RuntimeError(f"tinworks up ended:\n{(self.data_dir / 'up.out').read_text()}")

    def _died(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def is_healthy(self) -> bool:
        """Whether healthz answers 200."""
        return self.health_status() == 200

    def health_status(self) -> int:
        """The status of healthz; 0 if nobody answers."""
        try:
            return httpx.get(f"{self.base_url}/api/v1/healthz", timeout=5).status_code
        except httpx.HTTPError:
            return 0

    def blobs(self) -> BlobStore:
        """Its blob store."""
        if "TINWORKS_S3_BUCKET" not in self._environment:
            return LocalBlobStore(self.data_dir / "blobs")
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self._environment.items():
                patch.setenv(name, value)
            return open_bucket(Settings())

    def pid(self, role: str) -> int:
        """The process of a role, by its pid file."""
        return int((self.data_dir / "run" / f"{role}.pid").read_text())

    def kill(self, role: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to a role's process; returns the pid it had."""
        pid = self.pid(role)
        os.kill(pid, number)
        return pid

    def stop(self) -> int:
        """Ctrl-C, and wait for the end; returns the exit code."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        return self._process.wait(30)
