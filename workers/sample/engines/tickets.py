"""A job on its way through the native engine: its request, its sequences, and the result as it comes together."""

from __future__ import annotations

import math

import numpy as np

from app.errors import InvalidRequest
from app.wire.types import SampledSequence, SampleResult, StreamedToken
from workers.model.lora import Adapter
from workers.sample.engines.base import EngineFailure, Job
from workers.sample.engines.draw import stream
from workers.sample.engines.scores import PromptScores, empty_topk
from workers.sample.engines.stops import StopRule


class Ticket:
    """One job. Closed once its outcome is delivered; its sequences are dropped then."""

    def __init__(self, job: Job, stops: StopRule, *, context_length: int, vocab_size: int) -> None:
        """Raises `InvalidRequest` if the request cannot be served."""
        request = job.request
        self.job = job
        self.request = request
        assert job.adapter is None or isinstance(job.adapter, Adapter)
        self.adapter: Adapter | None = job.adapter
        self.stops = stops
        self.prompt = np.asarray(request.prompt, dtype=np.int64)
        self._check(context_length, vocab_size)
        room = max(1, context_length - len(self.prompt))
        wanted = room if request.params.max_tokens is None else request.params.max_tokens
        self.limit = max(1, min(wanted, room))
        """Tokens after which a sequence ends anyway."""
        self.begun = 0
        """Sequences that have been handed out for sampling."""
        self.scores = PromptScores.of(request)
        self.cache_hit_tokens = 0
        self.closed = False
        self._sequences: list[SampledSequence | None] = [None] * request.num_samples
        self._open = request.num_samples

    def _check(self, context_length: int, vocab_size: int) -> None:
        if not len(self.prompt):
            raise InvalidRequest("prompt: it has no tokens")
        if len(self.prompt) > context_length:
            raise InvalidRequest(f"prompt: {len(self.prompt)} tokens, this model's context has {context_length}")
        if self.prompt.min() < 0 or self.prompt.max() >= vocab_size:
            raise InvalidRequest(f"prompt: a token is outside of the vocabulary of {vocab_size}")
        if self.request.num_samples < 1:
            raise InvalidRequest("num_samples: must be at least 1")
        targets = self.request.target_prompt_logprobs
        if targets is not None and max(targets.tokens, default=0) >= vocab_size:
            raise InvalidRequest(f"target_prompt_logprobs: a token is outside of the vocabulary of {vocab_size}")
        temperature = self.request.params.temperature
        if not (math.isfinite(temperature) and temperature >= 0):
            raise InvalidRequest("sampling_params.temperature: must be a number ≥ 0")

    @property
    def cells(self) -> int:
        """Cached tokens that a sequence of this job may come to need: its last token is never fed back."""
        return len(self.prompt) + self.limit - 1

    @property
    def group(self) -> int:
        """Equal for jobs of one adapter; the base model's come first."""
        return 0 if self.adapter is None else id(self.adapter)

    def begin(self) -> Sequence:
        """The next of its sequences."""
        sequence = Sequence(self, self.begun)
        self.begun += 1
        return sequence

    def finish(self, sequence: Sequence, reason: str) -> SampleResult | None:
        """Take a sequence that has ended; the whole result if it was the last."""
        sequence.done = True
        self._sequences[sequence.index] = sequence.result(reason)
        self._open -= 1
        if self._open:
            return None
        done = [s for s in self._sequences if s is not None]
        if self.scores is None:
            return SampleResult(done, prompt_cache_hit_tokens=self.cache_hit_tokens)
        return self.scores.result(done, self.cache_hit_tokens)


class Sequence:
    """One continuation in the making. `slot`: where its keys and values are."""

    __slots__ = (
        "done",
        "index",
        "limit",
        "logprobs",
        "matcher",
        "slot",
        "stop_tokens",
        "stream",
        "ticket",
        "tokens",
        "topk",
    )

    def __init__(self, ticket: Ticket, index: int) -> None:
        self.ticket = ticket
        self.index = index
        self.slot = -1
        self.done = False
        self.stream = stream(ticket.request.params.seed, index)
        self.stop_tokens = ticket.stops.tokens
        self.matcher = ticket.stops.matcher(ticket.request.prompt)
        self.limit = ticket.limit
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.topk: list[tuple[np.ndarray, np.ndarray]] = []
        """Per token: ids and logprobs [k], most probable first."""

    @property
    def position(self) -> int:
        """Where its last token stands, counted from the prompt's first."""
        return len(self.ticket.prompt) + len(self.tokens) - 1

    @property
    def newest(self) -> StreamedToken:
        """Its last token."""
        topk = list(zip(*(array.tolist() for array in self.topk[-1]), strict=True)) if self.topk else []
        return StreamedToken(self.index, len(self.tokens) - 1, self.tokens[-1], self.logprobs[-1], topk)

    def accept(self, token: int, logprob: float) -> str | None:
        """Append a drawn token; the stop reason if it was the last. Raises `EngineFailure` if the model returned
        NaN."""
        if not math.isfinite(logprob):
            raise EngineFailure("the model's logits are not finite")
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_tokens or (self.matcher is not None and self.matcher.push(token)):
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def result(self, reason: str) -> SampledSequence:
        """What the client gets of it."""
        topk = None
        if k := self.ticket.request.topk_sample_logprobs:
            topk = empty_topk(len(self.tokens), k)
            for row, (ids, logprobs) in enumerate(self.topk):
                topk.token_ids[row, : len(ids)], topk.logprobs[row, : len(ids)] = ids, logprobs
        return SampledSequence(reason, np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32), topk)
