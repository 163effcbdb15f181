"""The vLLM engine: `AsyncLLM` on an asyncio loop in a thread of its own.

The thread that calls `step` owns all jobs: it makes tickets of them, asks vLLM for one request per sequence (a
`Flight`), and takes in what the loop's thread has put down. vLLM batches, keeps the caches and holds the adapters; all
that a request means beyond that (ends, scores, sentinels) is decided by the same code as in the native engine.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from app.errors import InvalidRequest, TinworksError
from app.wire.types import SampleResult
from workers.model.base import BaseModel
from workers.sample.engines.base import AdapterHandle, Cancelled, EngineFailure, Job
from workers.sample.engines.stops import Decode, StopRule
from workers.sample.engines.tickets import Sequence, Ticket
from workers.sample.engines.vllm_adapters import VllmAdapter, VllmAdapters
from workers.sample.engines.vllm_loop import Arrival, EngineDead, Flight, VllmLoop
from workers.sample.engines.vllm_options import VllmOptions
from workers.sample.engines.vllm_params import sequence_params
from workers.sample.engines.vllm_questions import Questions
from workers.sample.engines.vllm_results import PromptAnswers, accept

logger = structlog.get_logger(__name__)

DEAD_EXIT_CODE = 72


def end_process() -> None:
    """What a worker does whose vLLM is dead: end, so that its supervisor starts another. Its claims run out, and other
    samplers take the requests; one that kills every engine is given up by the count of its claims."""
    os._exit(DEAD_EXIT_CODE)


@dataclass(slots=True, eq=False)
class Running:
    """A job that vLLM works on."""

    ticket: Ticket
    adapter: VllmAdapter | None
    flights: list[Flight] = field(default_factory=list)
    questions: Questions | None = None
    answers: PromptAnswers | None = None


class VllmEngine:
    """See `Engine`."""

    def __init__(
        self,
        outline: BaseModel,
        options: VllmOptions,
        *,
        decode: Decode | None = None,
        on_death: Callable[[], None] = end_process,
    ) -> None:
        """Starts vLLM and returns when it is ready. `outline`: the model without its weights. `decode`: text of token
        ids, for stop strings. `on_death`: called once, in the thread that calls `step`, when vLLM has died.

        Raises what vLLM raises if it cannot start.
        """
        self._vocab_size = outline.facts.vocab_size
        self._eos = outline.eos_token_ids
        self._context_length = options.context_length
        self._decode_text = decode
        self._on_death = on_death
        self._dead = False
        self._submitted: deque[Job] = deque()
        self._cancelled: deque[str] = deque()
        self._running: dict[Ticket, Running] = {}
        self._loop = VllmLoop(options)
        self._adapters = VllmAdapters(self._loop, outline, max_rank=options.max_rank)

    def submit(self, job: Job) -> None:
        """Queue a job, from any thread."""
        if isinstance(job.adapter, VllmAdapter):
            self._adapters.hold(job.adapter)
        self._submitted.append(job)

    def cancel(self, request_id: str) -> None:
        """Drop the jobs of a request at the next step, from any thread."""
        self._cancelled.append(request_id)

    @property
    def running(self) -> int:
        """Sequences that are being sampled, or wait in vLLM."""
        return sum(running.ticket.request.num_samples for running in list(self._running.values()))

    @property
    def waiting(self) -> int:
        """Jobs that vLLM does not know of."""
        return len(self._submitted)

    def on_event(self, wake: Callable[[], None]) -> None:
        """Call `wake` when vLLM has something to tell."""
        self._loop.on_arrival = wake

    def load_adapter(self, snapshot_id: str, folder: Path) -> VllmAdapter:
        """Load an adapter into vLLM. Raises BadSnapshot, or InvalidRequest if its rank is above the bound."""
        return self._adapters.load(snapshot_id, folder)

    def unload_adapter(self, handle: AdapterHandle) -> None:
        """Let vLLM forget an adapter once the jobs that have it are done."""
        if isinstance(handle, VllmAdapter):
            self._adapters.retire(handle)

    def close(self) -> None:
        """End vLLM."""
        self._loop.close()
        self._adapters.close()

    def step(self) -> bool:
        """Hand new jobs over, take in what has arrived."""
        arrived = self._loop.arrived()
        worked = bool(self._submitted or self._cancelled or arrived)
        self._receive()
        for arrival in arrived:
            self._take(arrival)
        if self._loop.is_dead:
            self._die()
        return worked

    def _receive(self) -> None:
        """New jobs, then cancellations."""
        flights: list[Flight] = []
        while self._submitted:
            job = self._submitted.popleft()
            try:
                running = self._begin(job)
            except TinworksError as error:
                self._refuse(job, error)
            except (ValueError, TypeError, OverflowError) as error:
                self._refuse(job, InvalidRequest(str(error)))
            else:
                self._running[running.ticket] = running
                flights += running.flights
        self._loop.launch(flights)
        if self._cancelled:
            gone = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
            for running in [r for r in self._running.values() if r.ticket.request.request_id in gone]:
                self._close(running, Cancelled("the request was cancelled"))

    def _refuse(self, job: Job, error: TinworksError) -> None:
        if isinstance(job.adapter, VllmAdapter):
            self._adapters.release(job.adapter)
        job.finish(error)

    def _begin(self, job: Job) -> Running:
        """A ticket and its flights. Raises InvalidRequest, ValueError, TypeError or OverflowError."""
        adapter = job.adapter
        assert adapter is None or isinstance(adapter, VllmAdapter)
        request = job.request
        stops = StopRule.of(request.params, self._eos, self._decode_text)
        job = replace(job, adapter=None)
        ticket = Ticket(job, stops, context_length=self._context_length, vocab_size=self._vocab_size)
        if len(ticket.prompt) >= self._context_length:
            text = f"{len(ticket.prompt)} tokens leave no room in the context of {self._context_length}"
            raise InvalidRequest(f"prompt: {text}")
        running = Running(ticket, adapter, questions=Questions.of(request, self._vocab_size))
        piecewise = job.on_token is not None or bool(stops.strings)
        prompt = ticket.prompt.tolist()
        for index in range(request.num_samples):
            questions = running.questions if index == 0 else None
            params = sequence_params(ticket, index, questions, vocab_size=self._vocab_size, piecewise=piecewise)
            lora = None if adapter is None else adapter.request
            running.flights.append(Flight(prompt, params, lora, (running, ticket.begin())))
        return running

    def _take(self, arrival: Arrival) -> None:
        """An output of a flight, or the error that ended it."""
        running, sequence = arrival.flight.owner
        if running.ticket.closed or sequence.done:
            return
        try:
            if isinstance(arrival.output, Exception):
                raise arrival.output
            self._take_output(running, sequence, arrival.flight, arrival.output)
        except TinworksError as error:
            self._close(running, error)
        except EngineDead:
            return  # the whole process will end: others get the job
        except Exception as error:
            self._close(running, EngineFailure.caused_by(error))

    def _take_output(self, running: Running, sequence: Sequence, flight: Flight, output: Any) -> None:
        ticket = running.ticket
        if sequence.index == 0:
            ticket.cache_hit_tokens = output.num_cached_tokens or 0
            if running.questions is not None and output.prompt_logprobs:
                running.answers = PromptAnswers(running.questions, output.prompt_logprobs)
                if ticket.scores is not None:
                    running.answers.fill(ticket.scores)
        reason = accept(sequence, output.outputs[0])
        if reason is None:
            if output.finished:
                raise EngineFailure("vLLM has ended a sequence early")
            return
        if not output.finished:
            self._loop.abort([flight])
        result = ticket.finish(sequence, reason)
        if result is not None:
            if running.answers is not None:
                result = running.answers.complete(result, ticket.request)
            self._close(running, result)

    def _close(self, running: Running, outcome: SampleResult | TinworksError) -> None:
        """Deliver a job's outcome and forget the job."""
        ticket = running.ticket
        ticket.closed = True
        del self._running[ticket]
        self._loop.abort(running.flights)
        if running.adapter is not None:
            self._adapters.release(running.adapter)
        ticket.job.finish(outcome)

    def _die(self) -> None:
        if not self._dead:
            self._dead = True
            logger.error("vllm_died", running=self.running)
            self._on_death()
