"""Starts children, starts those that die again, and stops them all: one thread, no children's output in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from app.up import CannotStart
from app.up.child import Child, ChildSpec, describe_exit
from app.up.guard import Guard
from app.up.signals import Signals

STOP_GRACE_S = 5.0
TAIL_LINES = 12
LOUD_FAILURES = 6
"""So many deaths in a row are told one by one, later ones only each so many."""
Say = Callable[[str], None]


class StopRequested(Exception):
    """Ctrl-C, SIGTERM or a closed terminal."""


class Supervisor:
    """Keeps a set of processes alive. Every method but the constructor belongs to the main thread.

    Args:
        run_dir: where pid files go.
        log_dir: where logs go.
        say: prints one line for the person at the terminal.
    """

    def __init__(self, signals: Signals, *, run_dir: Path, log_dir: Path, say: Say) -> None:
        self._signals = signals
        self._folders = {"run_dir": run_dir, "log_dir": log_dir}
        self._say = say
        self._guard = Guard()
        self._children: list[Child] = []
        self._due: dict[str, float] = {}

    def start(self, spec: ChildSpec) -> Child:
        """Start a child that is started again whenever it ends."""
        child = self._new(spec)
        self._children.append(child)
        child.start()
        return child

    def run_all(self, specs: Iterable[ChildSpec]) -> None:
        """Run commands side by side to their end.

        Raises:
            CannotStart: one of them failed; its last lines are on the terminal.
            StopRequested: so the person wants.
        """
        steps = [self._new(spec) for spec in specs]
        try:
            for step in steps:
                step.start()
            self.wait_until(lambda: all(step.returncode is not None for step in steps))
            for step in steps:
                if step.returncode:
                    self._say_tail(step)
                    how = describe_exit(step.returncode)
                    raise CannotStart(f"{step.spec.role} failed ({how}); see {step.log_path}.")
        finally:
            for step in steps:
                step.forget()

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = float("inf")) -> bool:
        """Supervise until the condition holds. Returns whether it did within the time.

        Raises:
            StopRequested: so the person wants.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() >= deadline:
                return False
            self.tick(0.05)
        return True

    def tick(self, timeout_s: float) -> None:
        """Wait for a signal, at most so long; then do what is due.

        Raises:
            StopRequested: so the person wants.
        """
        now = time.monotonic()
        self._signals.wait(min([timeout_s, *(due - now for due in self._due.values())]))
        if self._signals.stop_requests:
            raise StopRequested
        for child in self._children:
            role = child.spec.role
            if role not in self._due and child.returncode is not None:
                self._bury(child)
            elif role in self._due and time.monotonic() >= self._due[role]:
                del self._due[role]
                child.start()

    def stop(self) -> None:
        """End every child: SIGTERM, then SIGKILL to its group after STOP_GRACE_S, or at once on a second Ctrl-C."""
        self._due.clear()
        for last in (False, True):
            phase = [child for child in self._children if child.spec.stops_last is last]
            for child in phase:
                child.terminate()
            deadline = time.monotonic() + STOP_GRACE_S
            while any(child.pid and child.returncode is None for child in phase):
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._signals.stop_requests > 1:
                    break
                self._signals.wait(left_s)
            for child in phase:
                if child.pid and child.returncode is None:
                    self._say(f"{child.spec.role} did not stop in time: killed.")
                child.forget()
        self._guard.close()

    def _new(self, spec: ChildSpec) -> Child:
        return Child(spec, guard=self._guard, **self._folders)

    def _bury(self, child: Child) -> None:
        returncode, uptime_s = child.returncode, child.uptime_s
        assert returncode is not None
        delay_s = child.record_death()
        self._due[child.spec.role] = time.monotonic() + delay_s
        if child.failures > LOUD_FAILURES and child.failures % LOUD_FAILURES:
            return
        self._say(
            f"{child.spec.role} ended ({describe_exit(returncode)}) after {uptime_s:.1f} s; "
            f"starting it again in {delay_s:.1f} s."
        )
        if returncode > 0 and (child.failures == 1 or child.failures % LOUD_FAILURES == 0):
            self._say_tail(child)

    def _say_tail(self, child: Child) -> None:
        self._say(f"  the last lines of {child.log_path}:")
        for line in child.last_lines(TAIL_LINES):
            self._say(f"  | {line[:500]}")
