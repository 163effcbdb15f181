"""A TCP proxy in threads of this process, between workers and their database, whose wires can be cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Literal

Mood = Literal["well", "cut", "stalled"]


class Wire:
    """Forwards connections to a port. `cut` ends them and refuses new ones; `stalled` ones stay open, and nothing
    passes until all is well."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream_port = upstream_port
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._listener = self._listen(0)
        self.port = int(self._listener.getsockname()[1])
        self._accept()

    @property
    def connections(self) -> int:
        """How many are open."""
        with self._lock:
            return len(self._open) // 2

    def become(self, mood: Mood) -> None:
        """Change for all connections."""
        if mood == "cut":
            self._end_all()
            return
        if self._listener.fileno() < 0:
            self._listener = self._listen(self.port)
            self._accept()
        (self._flowing.set if mood == "well" else self._flowing.clear)()

    def close(self) -> None:
        """End everything."""
        self._flowing.set()
        self._end_all()

    def _end_all(self) -> None:
        with self._lock:
            ended, self._open = self._open, set()
        for one in (self._listener, *ended):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    @staticmethod
    def _listen(port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(64)
        return listener

    def _accept(self) -> None:
        threading.Thread(target=self._accept_all, args=(self._listener,), daemon=True).start()

    def _accept_all(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:  # closed
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._upstream_port), timeout=5)
                far.settimeout(None)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._open |= {near, far}
            for pair in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                self._flowing.wait()
                sink.sendall(data)
        with self._lock:
            self._open -= {source, sink}
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
