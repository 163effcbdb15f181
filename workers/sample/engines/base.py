"""What a sampling engine is to the worker that owns it: jobs go in from any thread, and one thread turns the crank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import structlog

from app.errors import TinworksError
from app.wire.types import SampleRequest, SampleResult, StreamedToken

log = structlog.get_logger()


class Cancelled(TinworksError):
    """The job was cancelled before it was done."""


class EngineFailure(TinworksError):
    """The engine could not serve this job; others go on."""

    @classmethod
    def caused_by(cls, error: Exception) -> EngineFailure:
        """What a job gets that met with an unforeseen error, whose traceback comes along as the cause."""
        failure = cls(f"the engine failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure


class AdapterHandle(Protocol):
    """An adapter as its engine holds it. Only the engine that loaded it looks inside."""


OnToken = Callable[[StreamedToken], None]


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One request, the adapter that serves it (None: the base model), and where its outcome goes.

    `on_token`, if it is given, hears of every token of the sequences as it is drawn, before the outcome, in the thread
    that calls `Engine.step`; it must not raise.

    `deliver` is called exactly once, in the thread that calls `Engine.step`, with the result or with the error:
    `InvalidRequest` for what the client has to change, `Cancelled` after a `cancel`, `EngineFailure` for the rest.
    """

    request: SampleRequest
    adapter: AdapterHandle | None
    deliver: Callable[[SampleResult | Exception], None]
    on_token: OnToken | None = None

    def finish(self, outcome: SampleResult | Exception) -> None:
        """Deliver. What the receiver does wrong is its own affair and must not stop the engine."""
        try:
            self.deliver(outcome)
        except Exception:
            log.exception("deliver_failed", request_id=self.request.request_id)


class Engine(Protocol):
    """Serves many jobs at a time. `submit` and `cancel` may be called from any thread and return at once; all else
    happens in `step`, which one thread calls again and again, and which never raises for a job's sake.

    Adapters are loaded and unloaded from threads of their own, several at a time, while jobs run."""

    def submit(self, job: Job) -> None:
        """Queue a job."""

    def cancel(self, request_id: str) -> None:
        """Drop the jobs of this request at the next step, wherever they are. An unknown id is no error."""

    def step(self) -> bool:
        """One turn. False if there was nothing to do: the caller may sleep until the next `submit`, `cancel` or
        event."""

    def load_adapter(self, snapshot_id: str, folder: Path) -> AdapterHandle:
        """Load the adapter of a snapshot, from any thread but the one that calls `step`; it may take long, and running
        jobs go on meanwhile.

        `folder` holds the snapshot's files, in PEFT's layout (`adapter_config.json`, `adapter_model.safetensors`),
        checked, at a path that is this snapshot's alone; they stay until the handle is unloaded. Raises BadSnapshot if
        the files hold no adapter of this model.
        """

    def unload_adapter(self, handle: AdapterHandle) -> None:
        """No new job will name this handle; jobs that have it finish with it. From any thread; never raises."""

    def on_event(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, whenever `step` has something to do that no `submit` or `cancel` announced.
        It returns at once and does not raise. Said once, before the first `step`."""

    def close(self) -> None:
        """Nothing more will be asked; called once `step` is called no more. Never raises."""

    @property
    def running(self) -> int:
        """Sequences that are being sampled."""

    @property
    def waiting(self) -> int:
        """Jobs of which some sequence has not begun."""
