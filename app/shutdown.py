"""Stopping in time: polls are told as soon as the process is, not when its server has waited for them in vain.

uvicorn ends the lifespan only after the last request, and a held poll is a request. So the signal is heard here too.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def before_exit(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on the running loop at SIGINT or SIGTERM, before whoever else handles them."""
    if threading.current_thread() is not threading.main_thread():  # a test's server; signals are not for it
        yield
        return
    loop = asyncio.get_running_loop()
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(act)
        handler = previous[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    for number in previous:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
