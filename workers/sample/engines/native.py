"""The native engine: the training model itself, a KV cache, and continuous batching over requests and adapters.

Jobs wait in line. `admit` lets in as many sequences as fit; their prompts go through the model in waves, each prompt
once, however many sequences continue it. A sequence that goes on gets a slot of the `KVPool`; slots lie ordered by
adapter, so that each adapter is one slice of the batch (`Routing`). Every decoding step draws one token for all slots.
Who comes or goes moves a few slots; nothing else waits for it.

An error is narrowed down by halving the work until it is one prompt's or one sequence's own; its job fails, others go
on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from app.errors import InvalidRequest, TinworksError
from app.wire.types import SampleResult
from workers.model.base import BaseModel
from workers.model.lora import Adapter
from workers.sample.engines.admission import Limits, Wave, admit
from workers.sample.engines.base import AdapterHandle, Cancelled, EngineFailure, Job
from workers.sample.engines.batch import Batch, Drawn
from workers.sample.engines.forward import Forward, cache_bytes_per_token
from workers.sample.engines.kv_cache import KVPool, placed
from workers.sample.engines.prefill import draw_first, keeps, prefill_pass
from workers.sample.engines.stops import Decode, StopRule
from workers.sample.engines.tickets import Sequence, Ticket
from workers.train.snapshots import read_adapter_folder

PREFILLS_IN_A_ROW = 4
"""Running sequences get a step at the latest after so many passes over new prompts."""


class NativeEngine:
    """See `Engine`. It shares `base` with training: weights are read only, and no state stays in the modules."""

    def __init__(
        self,
        base: BaseModel,
        *,
        decode: Decode | None = None,
        eos: Seq[int] | None = None,
        context_length: int | None = None,
        max_rows: int = 256,
        cache_bytes: int = 2 << 30,
        prefill_tokens: int = 4096,
    ) -> None:
        """`decode`: text of token ids, for stop strings. `eos`, `context_length`: the model's own if None.

        `max_rows`: sequences at a time. `cache_bytes`: what keys and values may take, half as much again while they
        grow; a single sequence gets what it needs. `prefill_tokens`: in one pass over prompts, padding included.
        """
        self._base = base
        self._forward = Forward(base)
        self._decode_text = decode
        self._eos = tuple(base.eos_token_ids if eos is None else eos)
        self._context_length = context_length or base.facts.context_length
        cells = max(1, cache_bytes // cache_bytes_per_token(base))
        self._limits = Limits(max_rows, cells, prefill_tokens)
        self._pool = KVPool(cells)
        self._submitted: deque[Job] = deque()
        self._cancelled: deque[str] = deque()
        self._tickets: set[Ticket] = set()
        self._line: deque[Ticket] = deque()
        self._waves: deque[Wave] = deque()
        self._running: list[Sequence] = []
        self._batch: Batch | None = None
        """Of `_running`; None after a change."""
        self._changed = False
        """Whether a running sequence has ended since the ranks were closed."""
        self._prefills = 0
        """Passes over prompts since the last decoding step."""

    def submit(self, job: Job) -> None:
        """Queue a job, from any thread."""
        self._submitted.append(job)

    def cancel(self, request_id: str) -> None:
        """Drop the jobs of a request at the next step, from any thread."""
        self._cancelled.append(request_id)

    def load_adapter(self, snapshot_id: str, folder: Path) -> Adapter:
        """Read the adapter into memory, on the model's device. Raises BadSnapshot."""
        return read_adapter_folder(folder, self._base)

    def unload_adapter(self, handle: AdapterHandle) -> None:
        """Nothing to do: an adapter's memory is free once no job holds it."""

    def on_event(self, wake: Callable[[], None]) -> None:
        """Nothing to tell: all that this engine does it does in `step`."""

    def close(self) -> None:
        """Nothing to end."""

    @property
    def running(self) -> int:
        """Sequences that are being sampled, those whose prompt is under way included."""
        return len(self._running) + sum(len(wave.sequences) for wave in list(self._waves))

    @property
    def waiting(self) -> int:
        """Jobs of which some sequence has not begun."""
        return len(self._submitted) + len(self._line)

    @torch.no_grad()
    def step(self) -> bool:
        """Let jobs in, then one pass: over new prompts, or one token for all that run."""
        self._receive()
        if not self._waves:
            self._waves.extend(admit(self._line, self._running, self._limits))
        if self._waves and not (self._running and self._prefills >= PREFILLS_IN_A_ROW):
            self._prefills += 1
            self._prefill(self._waves.popleft())
            return True
        self._prefills = 0
        if not self._running:
            return False
        if self._batch is None:
            self._batch = Batch(self._running, 0, self._forward)
        self._advance(self._batch)
        self._settle()
        return True

    def _receive(self) -> None:
        """Take in what other threads have left: new jobs, then cancellations."""
        while self._submitted:
            job = self._submitted.popleft()
            try:
                ticket = self._ticket(job)
            except TinworksError as error:
                job.finish(error)
            except (ValueError, TypeError, OverflowError) as error:
                job.finish(InvalidRequest(str(error)))
            else:
                self._tickets.add(ticket)
                self._line.append(ticket)
        if self._cancelled:
            gone = {self._cancelled.popleft() for _ in range(len(self._cancelled))}
            for ticket in [t for t in self._tickets if t.request.request_id in gone]:
                self._close(ticket, Cancelled("the request was cancelled"))
            self._settle()

    def _ticket(self, job: Job) -> Ticket:
        stops = StopRule.of(job.request.params, self._eos, self._decode_text)
        return Ticket(job, stops, context_length=self._context_length, vocab_size=self._forward.vocab_size)

    def _prefill(self, wave: Wave) -> None:
        """One pass of a wave; what is left of it goes back to the front."""
        wave.drop_closed()
        if not wave.sequences:
            return
        try:
            drawn = self._prefill_pass(wave)
        except Exception as error:
            for slot in {sequence.slot for sequence in wave.sequences}:
                self._pool.clear(slot)
            if len(wave.prompts) > 1:
                self._waves.extendleft(reversed(wave.split()))
                return
            for ticket in wave.prompts[0].tickets:
                self._close(ticket, EngineFailure.caused_by(error))
            self._settle()
            return
        if drawn is None:
            self._waves.appendleft(wave)
            return
        self._take(wave.sequences, drawn)
        self._settle(wave.sequences)

    def _prefill_pass(self, wave: Wave) -> Drawn | None:
        """The next tokens of a wave; the sequences' first tokens if it is through."""
        count = len(wave.prompts)
        length = min(wave.length - wave.offset, max(1, self._limits.prefill_tokens // count))
        pool = None
        if keeps(wave, length):
            if wave.offset == 0:
                wave.start = len(self._running)
                for row, prompt in enumerate(wave.prompts):
                    for sequence in prompt.sequences:
                        sequence.slot = wave.start + row
            pool = self._pool
            self._reserve(wave.start + count, wave.offset + length, wave)
        hidden_BLD = prefill_pass(self._forward, pool, wave, length)
        return draw_first(self._forward, wave, hidden_BLD) if wave.offset >= wave.length else None

    def _reserve(self, rows: int, length: int, wave: Wave | None = None, new: Seq[Sequence] = ()) -> None:
        """Make room in the pool. What running and `new` sequences and a wave between two passes have written stays."""
        wave = wave or (self._waves[0] if self._waves else None)
        written = [(s.slot + 1, s.position) for s in (*self._running, *new)]
        if wave is not None and wave.offset > 0:
            written.append((wave.start + len(wave.prompts), wave.offset))
        live_rows = max((row for row, _ in written), default=0)
        live_length = max((end for _, end in written), default=0)
        rows, length = max(rows, live_rows), max(length, live_length)
        self._pool.reserve(rows, length, live_rows=live_rows, live_length=live_length)

    def _advance(self, batch: Batch) -> None:
        """One token for each sequence of the batch; after an error, for each half of it."""
        try:
            self._reserve(len(self._running), batch.longest)
            drawn = batch.step(self._pool)
        except Exception as error:
            self._batch = None
            if len(batch.sequences) > 1:
                for half in batch.halves():
                    self._advance(half)
                return
            [sequence] = batch.sequences
            self._pool.clear(sequence.slot)
            self._close(sequence.ticket, EngineFailure.caused_by(error))
            return
        self._take(batch.sequences, drawn)

    def _take(self, sequences: Seq[Sequence], drawn: Drawn) -> None:
        """Append what was drawn; deliver what is complete."""
        for row, topk in drawn.topk.items():
            sequences[row].topk.append(topk)
        for sequence, token, logprob in zip(sequences, drawn.tokens, drawn.logprobs, strict=True):
            ticket = sequence.ticket
            if not math.isfinite(logprob):
                self._pool.clear(sequence.slot)
            if ticket.closed:
                continue
            try:
                reason = sequence.accept(token, logprob)
            except Exception as error:
                self._close(ticket, error if isinstance(error, TinworksError) else EngineFailure.caused_by(error))
                continue
            if ticket.job.on_token is not None:
                ticket.job.on_token(sequence.newest)
            if reason is not None:
                self._changed = True
                result = ticket.finish(sequence, reason)
                if result is not None:
                    self._close(ticket, result)

    def _close(self, ticket: Ticket, outcome: SampleResult | TinworksError) -> None:
        """Deliver a job's outcome, unless it has one, and forget the job."""
        if ticket.closed:
            return
        ticket.closed = self._changed = True
        self._tickets.discard(ticket)
        if ticket.begun < ticket.request.num_samples:
            self._line.remove(ticket)
        ticket.job.finish(outcome)

    def _settle(self, new: Seq[Sequence] = ()) -> None:
        """Let `new` sequences into the batch and those that ended out of it, and close ranks: slots 0 … n-1, by
        adapter."""
        if not (new or self._changed):
            return
        self._changed = False
        alive = [s for s in (*self._running, *new) if not (s.done or s.ticket.closed)]
        alive.sort(key=lambda s: s.ticket.group)
        targets = placed([s.ticket.group for s in alive], [s.slot for s in alive])
        moves = [(s, target) for s, target in zip(alive, targets, strict=True) if s.slot != target]
        if moves:
            length = max(s.position for s, _ in moves)
            self._reserve(len(alive), length, new=alive)
            self._pool.move([s.slot for s, _ in moves], [target for _, target in moves], length)
            for sequence, target in moves:
                sequence.slot = target
        self._running = sorted(alive, key=lambda s: s.slot)
        self._batch = None
