"""The external engine: jobs go to a vLLM server that somebody else runs, over its OpenAI-compatible routes.

It does what those routes can tell; the rest is refused by name (`external_requests.refuse`). Adapters are loaded at run
time, so the server has to see the worker's adapter folder, and runs with `VLLM_ALLOW_RUNTIME_LORA_UPDATING=1` and
`--enable-lora`. Sequences come as a whole: a streamed job hears of its tokens at their end.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import httpx
import structlog

from app.errors import InvalidRequest, TinworksError
from app.settings import Settings
from app.wire.types import SampleResult
from workers.model.base import BaseModel
from workers.sample.engines.base import AdapterHandle, Cancelled, EngineFailure, Job
from workers.sample.engines.external_requests import completion_body, refuse, take_completion
from workers.sample.engines.stops import Decode, StopRule
from workers.sample.engines.tickets import Sequence, Ticket
from workers.snapshot_files import BadSnapshot
from workers.train.snapshots import read_adapter_folder

logger = structlog.get_logger(__name__)

T = TypeVar("T")
CONNECT_S = 5.0
CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class ExternalOptions:
    """`url`: of the server, without `/v1`. `model`: the base model's name there, empty: the first that it lists.
    `answer_s`: how long a sequence may take. `transport`: how requests travel, if not over the network."""

    url: str
    model: str = ""
    api_key: str = ""
    answer_s: float = 3600.0
    transport: httpx.AsyncBaseTransport | None = None

    @classmethod
    def of(cls, settings: Settings) -> ExternalOptions:
        """Those of a worker."""
        return cls(settings.vllm_url.rstrip("/").removesuffix("/v1"), settings.vllm_model, settings.vllm_api_key)


@dataclass(slots=True, eq=False)
class ExternalAdapter:
    """An adapter that the server has, under a name that is never used again."""

    name: str
    trains_unembedding: bool
    jobs: int = 0
    retired: bool = False


@dataclass(slots=True, eq=False)
class _Running:
    ticket: Ticket
    adapter: ExternalAdapter | None
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class ExternalEngine:
    """See `Engine`."""

    def __init__(self, outline: BaseModel, options: ExternalOptions, *, decode: Decode | None = None) -> None:
        """`outline`: the model without its weights. Raises ValueError if the server does not answer or does not serve
        the model."""
        self._outline = outline
        self._options = options
        self._decode_text = decode
        self._vocab_size = outline.facts.vocab_size
        self._context_length = outline.facts.context_length
        self._wake: Callable[[], None] = lambda: None
        self._submitted: deque[Job] = deque()
        self._cancelled: deque[str] = deque()
        self._arrived: deque[tuple[_Running, Sequence, dict[str, Any] | Exception]] = deque()
        self._running: dict[Ticket, _Running] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="external", daemon=True)
        self._thread.start()
        try:
            self._call(self._open())
        except BaseException:
            self.close()
            raise

    def submit(self, job: Job) -> None:
        """Queue a job, from any thread."""
        if isinstance(job.adapter, ExternalAdapter):
            with self._lock:
                job.adapter.jobs += 1
        self._submitted.append(job)

    def cancel(self, request_id: str) -> None:
        """Drop the jobs of a request at the next step, from any thread."""
        self._cancelled.append(request_id)

    @property
    def running(self) -> int:
        """Sequences that the server was asked for."""
        return sum(running.ticket.request.num_samples for running in list(self._running.values()))

    @property
    def waiting(self) -> int:
        """Jobs that it was not asked for yet."""
        return len(self._submitted)

    def on_event(self, wake: Callable[[], None]) -> None:
        """Call `wake` when the server has answered."""
        self._wake = wake

    def close(self) -> None:
        """Close the connections."""
        with suppress(Exception):
            self._later(self._shutdown()).result(CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def step(self) -> bool:
        """Send new jobs, take in what has arrived."""
        worked = bool(self._submitted or self._cancelled or self._arrived)
        while self._submitted:
            self._begin(self._submitted.popleft())
        if self._cancelled:
            gone = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
            for running in [r for r in self._running.values() if r.ticket.request.request_id in gone]:
                self._close(running, Cancelled("the request was cancelled"))
        for _ in range(len(self._arrived)):
            self._take(*self._arrived.popleft())
        return worked

    def load_adapter(self, snapshot_id: str, folder: Path) -> ExternalAdapter:
        """Let the server load an adapter. Raises BadSnapshot."""
        adapter = read_adapter_folder(folder, self._outline)
        trained = any(self._outline.targets[path].group == "unembed" for path in adapter.modules)
        handle = ExternalAdapter(f"{snapshot_id}-{next(self._numbers)}", trained)
        body = {"lora_name": handle.name, "lora_path": str(folder), "is_3d_lora_weight": True}
        answer = self._call(self._post("load_lora_adapter", body))
        if answer.status_code != httpx.codes.OK:
            raise BadSnapshot(f"the vLLM server does not load the checkpoint's adapter: {message_of(answer)}")
        return handle

    def unload_adapter(self, handle: AdapterHandle) -> None:
        """Let the server forget an adapter once the jobs that have it are done."""
        assert isinstance(handle, ExternalAdapter)
        with self._lock:
            gone = not handle.retired and handle.jobs == 0
            handle.retired = True
        if gone:
            self._forget(handle)

    def _release(self, adapter: AdapterHandle | None) -> None:
        if not isinstance(adapter, ExternalAdapter):
            return
        with self._lock:
            adapter.jobs -= 1
            gone = adapter.retired and adapter.jobs == 0
        if gone:
            self._forget(adapter)

    def _forget(self, adapter: ExternalAdapter) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._later(self._post("unload_lora_adapter", {"lora_name": adapter.name}))

    def _begin(self, job: Job) -> None:
        adapter = job.adapter
        assert adapter is None or isinstance(adapter, ExternalAdapter)
        try:
            refuse(job.request, trains_unembedding=adapter is not None and adapter.trains_unembedding)
            stops = StopRule.of(job.request.params, self._outline.eos_token_ids, self._decode_text)
            ticket = Ticket(
                replace(job, adapter=None), stops, context_length=self._context_length, vocab_size=self._vocab_size
            )
            if len(ticket.prompt) >= self._context_length:
                raise InvalidRequest(f"prompt: {len(ticket.prompt)} tokens leave no room in {self._context_length}")
        except (TinworksError, ValueError, TypeError, OverflowError) as error:
            self._release(adapter)
            job.finish(error if isinstance(error, TinworksError) else InvalidRequest(str(error)))
            return
        running = self._running[ticket] = _Running(ticket, adapter)
        model = self._model if adapter is None else adapter.name
        for index in range(ticket.request.num_samples):
            body = completion_body(ticket, index, model=model, vocab_size=self._vocab_size)
            self._loop.call_soon_threadsafe(self._launch, running, ticket.begin(), body)

    def _launch(self, running: _Running, sequence: Sequence, body: dict[str, Any]) -> None:
        if not running.ticket.closed:
            running.tasks.append(self._loop.create_task(self._ask(running, sequence, body)))

    async def _ask(self, running: _Running, sequence: Sequence, body: dict[str, Any]) -> None:
        arrived: dict[str, Any] | Exception
        try:
            answer = await self._post("completions", body)
            if answer.status_code == httpx.codes.OK:
                arrived = answer.json()
            elif answer.is_client_error:
                arrived = InvalidRequest(f"the vLLM server refuses the request: {message_of(answer)}")
            else:
                arrived = EngineFailure(f"the vLLM server answered {answer.status_code}: {message_of(answer)}")
        except (httpx.HTTPError, ValueError) as error:
            arrived = EngineFailure.caused_by(error)
        self._arrived.append((running, sequence, arrived))
        self._wake()

    def _take(self, running: _Running, sequence: Sequence, arrived: dict[str, Any] | Exception) -> None:
        if running.ticket.closed:
            return
        try:
            if isinstance(arrived, Exception):
                raise arrived
            reason = take_completion(sequence, arrived)
        except TinworksError as error:
            self._close(running, error)
            return
        except Exception as error:
            self._close(running, EngineFailure.caused_by(error))
            return
        result = running.ticket.finish(sequence, reason)
        if result is not None:
            self._close(running, result)

    def _close(self, running: _Running, outcome: SampleResult | TinworksError) -> None:
        running.ticket.closed = True
        del self._running[running.ticket]
        self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in running.tasks])
        self._release(running.adapter)
        running.ticket.job.finish(outcome)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        answer: T = self._later(work).result()
        return answer

    def _later(self, work: Coroutine[Any, Any, T]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _open(self) -> None:
        options = self._options
        self._client = httpx.AsyncClient(
            base_url=f"{options.url}/v1/",
            headers={"Authorization": f"Bearer {options.api_key}"} if options.api_key else {},
            timeout=httpx.Timeout(options.answer_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            transport=options.transport
            or httpx.AsyncHTTPTransport(retries=3, limits=httpx.Limits(max_connections=None)),
        )
        try:
            answer = await self._client.get("models", timeout=CONNECT_S)
            models = answer.raise_for_status().json()["data"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise ValueError(f"TINWORKS_VLLM_URL: no vLLM server answers at {options.url}: {error}") from error
        served = {model["id"]: model for model in models}
        self._model = options.model or next(iter(served), "")
        if self._model not in served:
            raise ValueError(f"TINWORKS_VLLM_MODEL: {options.url} serves {', '.join(served)}, not {self._model!r}")
        longest = served[self._model].get("max_model_len")
        self._context_length = min(self._context_length, longest or self._context_length)

    async def _post(self, route: str, body: dict[str, Any]) -> httpx.Response:
        return await self._client.post(route, json=body)

    async def _shutdown(self) -> None:
        for running in self._running.values():
            for task in running.tasks:
                task.cancel()
        await self._client.aclose()


def message_of(answer: httpx.Response) -> str:
    """What the server says of an error."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]
