"""TLS in front of a server that has none, with a certificate that it has signed itself, as managed services do."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def self_signed(folder: Path) -> Path:
    """A fresh key and certificate in one file, for a name that is not ours."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    path = folder / "self-signed.pem"
    subject = ["-subj", "/CN=somewhere.example", "-days", "1"]
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path, "-out", path]
    subprocess.run(["openssl", "req", "-x509", *options, *subject], check=True, capture_output=True)
    return path


@contextmanager
def tls_front(port: int, certificate: Path) -> Iterator[int]:
    """The port at which the server on `port` speaks TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=relay, args=(plain,), daemon=True).start()

    def relay(plain: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as client:
            with socket.create_connection(("127.0.0.1", port)) as server:
                back = threading.Thread(target=copy, args=(server, client), daemon=True)
                back.start()
                copy(client, server)

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        listener.close()
