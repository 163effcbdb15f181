"""The few things about addresses that `tinworks up` has to know."""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from app.up import CannotStart


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def base_url(host: str, port: int) -> str:
    """The URL by which a client on this machine reaches a server that listens on `host`."""
    reachable = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port on `host` that nobody listens on."""
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def check_port(host: str, port: int) -> None:
    """Make sure that a server could listen there.

    Raises:
        CannotStart: the port is taken, or the address is not ours to listen on.
    """
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise CannotStart(
                    f"Port {port} on {host} is taken by another program; choose another one with --port."
                ) from error
            raise CannotStart(f"Cannot listen on {host}, port {port}: {error.strerror or error}.") from error


def answers_ping(port: int, *, timeout_s: float = 0.5) -> bool:
    """Whether a Redis server on this loopback port is ready for commands."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def health(url: str, *, timeout_s: float = 1.0) -> tuple[int, str]:
    """GET a health route. Returns its status (0: nobody answers) and, when it is not 200, what it says is missing."""
    try:
        with _opener().open(url, timeout=timeout_s) as response:
            return int(response.status), ""
    except urllib.error.HTTPError as error:
        return error.code, _missing(error.read(4096))
    except (OSError, ValueError):
        return 0, "web does not answer yet"


def without_password(url: str) -> str:
    """A URL for the terminal: its password, if any, is left out."""
    parts = urlsplit(url)
    if not parts.password:
        return url
    return parts._replace(netloc=f"{parts.username or ''}:***@{parts.netloc.rpartition('@')[2]}").geturl()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy


def _missing(body: bytes) -> str:
    try:
        missing = json.loads(body).get("missing")
    except (ValueError, AttributeError):
        return ""
    return ", ".join(map(str, missing)) if isinstance(missing, list) else str(missing or "")
