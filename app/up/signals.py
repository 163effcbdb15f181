"""The signals of `tinworks up`, as something that its one thread can wait for."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import time
from types import FrameType, TracebackType
from typing import Any

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_REQUEST_S = 0.25
"""Signals closer together are one request: `timeout` and others signal a process and then its group."""


class Signals:
    """Counts requests to stop, and wakes `wait` for them and for each child that ends. Main thread only."""

    def __init__(self) -> None:
        self.stop_requests = 0
        self._last_stop = float("-inf")
        self._reader, self._writer = socket.socketpair()
        self._previous: dict[int, Any] = {}
        self._previous_fd = -1

    def __enter__(self) -> Signals:
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        for signum in STOPPING:
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue  # nohup
            self._previous[signum] = signal.signal(signum, self._stop)
        self._previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(self._previous_fd)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        self._reader.close()
        self._writer.close()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a signal comes or the time is over."""
        if select.select([self._reader], [], [], max(timeout_s, 0.0))[0]:
            with contextlib.suppress(BlockingIOError):
                self._reader.recv(4096)

    def _stop(self, signum: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._last_stop > SAME_REQUEST_S:
            self.stop_requests += 1
        self._last_stop = time.monotonic()
