"""vLLM's `AsyncLLM` and the asyncio loop that it lives on, in a thread of their own.

Requests (`Flight`) go in from one thread; what they give is put down for that thread to take (`arrived`).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from app.errors import InvalidRequest
from workers.sample.engines.vllm_options import VllmOptions
from workers.sample.engines.vllm_plugin import OWNER

logger = structlog.get_logger(__name__)

T = TypeVar("T")
CLOSE_S = 20.0
WATCH_EVERY_S = 5.0
_V2 = "VLLM_USE_V2_MODEL_RUNNER"


class EngineDead(Exception):
    """vLLM's processes have ended, or will not answer any more."""


@dataclass(slots=True, eq=False)
class Flight:
    """One request to vLLM. `owner`: whatever its sender wants to find it by."""

    prompt: list[int]
    params: Any
    lora: Any
    owner: Any
    task: asyncio.Task[None] | None = None
    aborted: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """vLLM's `RequestOutput` for a flight, or the error that ended it."""

    flight: Flight
    output: Any


@dataclass(slots=True, eq=False)
class _Users:
    """The flights under way with one adapter."""

    tasks: set[asyncio.Task[None]] = field(default_factory=set)


class VllmLoop:
    """A running vLLM. Methods may be called from any thread but its own."""

    def __init__(self, options: VllmOptions) -> None:
        """Starts it; returns when it is ready. Raises what vLLM raises."""
        self.on_arrival: Callable[[], None] = _nobody
        self._arrivals: deque[Arrival] = deque()
        self._users: dict[int, _Users] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._llm: Any = None
        self._closing = False
        self._broken = False
        self._thread = threading.Thread(target=self._run, name="vllm", daemon=True)
        self._thread.start()
        try:
            self.call(self._open(options))
        except BaseException:
            self._stop_loop()
            raise

    @property
    def is_dead(self) -> bool:
        """Whether it has died; not if it was closed."""
        return not self._closing and (self._broken or bool(self._llm.errored))

    def arrived(self) -> list[Arrival]:
        """What has come in since the last time, in order."""
        return [self._arrivals.popleft() for _ in range(len(self._arrivals))]

    def launch(self, flights: Iterable[Flight]) -> None:
        """Send requests. Returns at once."""
        new = list(flights)
        if new:
            self._soon(self._launch, new)

    def abort(self, flights: Iterable[Flight]) -> None:
        """End requests; one that has ended is let be. Returns at once."""
        rest = [flight for flight in flights if not (flight.task is not None and flight.task.done())]
        if rest:
            self._soon(self._abort, rest)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs on the loop."""
        return self.later(work).result()

    def later(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """The same, not waited for."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def add_adapter(self, lora: Any) -> None:
        """Load an adapter into all of vLLM's processes. Raises EngineDead, or what vLLM raises for a bad one."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._llm.add_lora(lora)
        except EngineDeadError as error:
            self._broken = True
            self.on_arrival()
            raise EngineDead(str(error)) from error

    async def remove_adapter(self, lora: Any) -> None:
        """Forget an adapter, once what is under way with it has ended."""
        users = self._users.pop(lora.lora_int_id, None)
        if users is not None and users.tasks:
            await asyncio.wait(set(users.tasks))
        with suppress(Exception):
            await self._llm.remove_lora(lora.lora_int_id)

    def close(self) -> None:
        """End vLLM and the thread."""
        self._closing = True
        with suppress(Exception):
            self.later(self._shutdown()).result(CLOSE_S)
        self._stop_loop()

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _soon(self, work: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(work, *args)

    async def _open(self, options: VllmOptions) -> None:
        prepare_environment()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**options.arguments()))
        await self._warm_up()
        self._watching = asyncio.create_task(self._watch(options.stalled_s), name="watch")

    async def _warm_up(self) -> None:
        """Let vLLM compile what it compiles when it is first needed."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        params = SamplingParams(max_tokens=1, logprobs=1, prompt_logprobs=1, ignore_eos=True, detokenize=False)
        async for _ in self._llm.generate(tokens_input([0, 0]), params, "warm-up"):
            pass

    async def _watch(self, stalled_s: float) -> None:
        """Note when vLLM is dead, or does not answer. It may lose the thread that takes requests in, and stay up."""
        while not (self._closing or self.is_dead):
            await asyncio.sleep(WATCH_EVERY_S)
            try:
                await asyncio.wait_for(self._llm.list_loras(), stalled_s)
            except Exception as error:
                logger.error("vllm_does_not_answer", error=type(error).__name__)
                self._broken = True
        self.on_arrival()

    async def _shutdown(self) -> None:
        for task in asyncio.all_tasks():
            if task.get_name() in ("flight", "watch"):
                task.cancel()
        self._llm.shutdown()

    def _launch(self, flights: list[Flight]) -> None:
        for flight in flights:
            if flight.aborted:
                continue
            flight.task = self._loop.create_task(self._fly(flight), name="flight")
            if flight.lora is not None:
                tasks = self._users.setdefault(flight.lora.lora_int_id, _Users()).tasks
                tasks.add(flight.task)
                flight.task.add_done_callback(tasks.discard)

    def _abort(self, flights: list[Flight]) -> None:
        for flight in flights:
            flight.aborted = True
            if flight.task is not None:
                flight.task.cancel()

    async def _fly(self, flight: Flight) -> None:
        from vllm.exceptions import VLLMValidationError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            async for output in self._llm.generate(
                tokens_input(flight.prompt), flight.params, str(next(self._numbers)), lora_request=flight.lora
            ):
                self._put(flight, output)
        except EngineDeadError as error:
            self._broken = True
            self._put(flight, EngineDead(str(error)))
        except VLLMValidationError as error:
            self._put(flight, InvalidRequest(str(error)))
        except Exception as error:
            self._put(flight, error)

    def _put(self, flight: Flight, output: Any) -> None:
        self._arrivals.append(Arrival(flight, output))
        self.on_arrival()


def prepare_environment() -> None:
    """What vLLM's processes have to find in their environment. A value that is set stays, but for those without which
    answers would be wrong: these raise ValueError."""
    if os.environ.get(_V2, "0") not in ("0", ""):
        raise ValueError(f"{_V2} must be 0: prompt logprobs with adapters are right in vLLM's V1 model runner only")
    os.environ[_V2] = "0"
    os.environ[OWNER] = str(os.getpid())
    os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def _nobody() -> None:
    """Nobody wants to know."""
