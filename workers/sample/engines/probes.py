"""What a request asks about its prompt beyond the prompt's own tokens: logprobs of tokens that it names, and tokens
drawn at every position (WIRE §5.5, SEMANTICS §6).

A probe sees the logprobs of all positions from `first` on, a few at a time and some of them more than once, and picks
its part. Row i of what it gathers is of position i+1.

Letters in shapes: P tokens of a prompt, N positions seen at a time, M cells that name a token, K targets or draws of a
position, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from app.wire.types import AltTokens, PromptTargets, SampleRequest, TargetLogprobs
from workers.sample.engines.draw import GREEDY_BELOW, invert_many, stream, uniforms

ALT_STREAM = -1
"""The index of the stream that decides a request's draws at its prompt; its sequences have those from 0 on."""


class Probe(Protocol):
    """One thing to find out about a prompt."""

    @property
    def first(self) -> int:
        """The first position that it has to see, 1 or more."""

    def see(self, start: int, logprobs_NV: Tensor) -> None:
        """Take what is wanted of positions `start` … `start + N - 1`; `logprobs_NV` are untempered."""


class TargetProbe:
    """The logprobs of named tokens."""

    def __init__(self, targets: PromptTargets) -> None:
        """Raises ValueError if no token is named."""
        self._targets = targets
        tokens = np.asarray(targets.tokens, np.int64)
        (self._cells_M,) = np.nonzero(tokens >= 0)
        if not len(self._cells_M):
            raise ValueError("target_prompt_logprobs.data: names no token")
        self._tokens_M = torch.from_numpy(tokens[self._cells_M])
        self._positions_M = targets.cell_rows()[self._cells_M] + 1
        self._logprobs = np.zeros(len(tokens), np.float32)

    @property
    def first(self) -> int:
        """The first position with a named token."""
        return int(self._positions_M[0])

    def see(self, start: int, logprobs_NV: Tensor) -> None:
        """See `Probe`."""
        low, high = np.searchsorted(self._positions_M, (start, start + len(logprobs_NV)))
        if low == high:
            return
        rows = torch.from_numpy(self._positions_M[low:high] - start)
        device = logprobs_NV.device
        picked = logprobs_NV[rows.to(device), self._tokens_M[low:high].to(device)]
        self._logprobs[self._cells_M[low:high]] = picked.cpu().numpy()

    def result(self) -> TargetLogprobs:
        """What it has found."""
        return TargetLogprobs(self._targets, self._logprobs)


class AltProbe:
    """K tokens at each position, drawn independently at the request's temperature. Top-k and top-p do not apply: the
    draws are of the whole distribution (WIRE §5.5). The request's seed decides them, together with position and
    number."""

    first = 1

    def __init__(self, request: SampleRequest) -> None:
        rows, self._count = len(request.prompt) - 1, request.prompt_alt_tokens_k
        self._temperature = request.params.temperature
        self._stream = stream(request.params.seed, ALT_STREAM)
        self._tokens = np.zeros((rows, self._count), np.int64)
        self._logprobs = np.zeros((rows, self._count), np.float32)

    def see(self, start: int, logprobs_NV: Tensor) -> None:
        """See `Probe`."""
        rows = slice(start - 1, start - 1 + len(logprobs_NV))
        tokens_NK = self._draw(rows, logprobs_NV)
        self._tokens[rows] = tokens_NK.cpu().numpy()
        self._logprobs[rows] = logprobs_NV.gather(1, tokens_NK).cpu().numpy()

    def _draw(self, rows: slice, logprobs_NV: Tensor) -> Tensor:
        if self._temperature < GREEDY_BELOW:
            return logprobs_NV.argmax(-1, keepdim=True).expand(-1, self._count)
        numbers = np.arange(rows.start * self._count, rows.stop * self._count)
        unit = uniforms(np.full(len(numbers), self._stream, np.uint64), numbers)
        unit_NK = torch.from_numpy(unit.reshape(-1, self._count)).to(logprobs_NV.device)
        tempered_NV = (logprobs_NV - logprobs_NV.amax(-1, keepdim=True)) / self._temperature
        return invert_many(torch.softmax(tempered_NV, -1), unit_NK)

    def result(self) -> AltTokens:
        """What it has drawn."""
        return AltTokens(self._tokens, self._logprobs)
