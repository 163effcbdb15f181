"""How a container's health check sees that a process without a port is alive: by the age of a file.

A worker's presence thread touches `TINWORKS_ALIVE_FILE` at every beat, with or without broker and database: while those
are away, a restart would help nobody. A scheduler touches it whenever it tidies, so it is given more time.

`python -m app.alive [SECONDS]` exits with 1 when the file is older than that, or missing. Unless it is said, that is
two minutes, or more where leases are long.
"""

from __future__ import annotations

import sys
import time

from app.settings import Settings, get_settings

OLDEST_S = 120.0


def touch(settings: Settings) -> None:
    """Say that this process is alive, if somebody has asked for it. A disk that is full is not a death."""
    if settings.alive_file is not None:
        try:
            settings.alive_file.touch()
        except OSError:
            return


def age_s(settings: Settings) -> float:
    """How long ago that was; infinite without a file."""
    if settings.alive_file is None or not settings.alive_file.exists():
        return float("inf")
    return max(0.0, time.time() - settings.alive_file.stat().st_mtime)


def main() -> int:
    """The exit status."""
    settings = get_settings()
    oldest_s = float(sys.argv[1]) if len(sys.argv) > 1 else max(OLDEST_S, settings.worker_silence_s)
    return int(age_s(settings) > oldest_s)


if __name__ == "__main__":
    sys.exit(main())
