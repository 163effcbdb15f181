"""A few threads for work that waits on disks and networks, beside the loops that compute."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_Task = tuple[Callable[[], Any], "Future[Any]"]


class Background:
    """At most `count` threads, which take what they are given in order. Unlike those of an executor they never hold up
    the end of the process, whatever they wait for.

    `prepare` is called first in each thread.
    """

    def __init__(self, count: int, name: str, *, prepare: Callable[[], None] | None = None) -> None:
        self._name = name
        self._count = count
        self._prepare = prepare
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Call it soon, from one thread."""
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        future: Future[T] = Future()
        self._tasks.put((call, future))
        return future

    def stop(self, timeout_s: float, *, finish: bool = True) -> bool:
        """End the threads, after what waits if it is to be finished, else after what runs. False if some are still
        busy after `timeout_s`; they end when they can, and their process need not wait for them."""
        while not finish:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            if task is not None:
                task[1].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        if self._prepare is not None:
            self._prepare()
        while (task := self._tasks.get()) is not None:
            call, future = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
