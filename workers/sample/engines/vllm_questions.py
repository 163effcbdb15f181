"""What a request asks about its prompt, on the way to the process that has the logits, and the answers on the way back.

vLLM tells the k most probable tokens at each position of a prompt. It is asked here for more columns than k, and the
plugin fills these with logprobs of tokens that the request names, and with tokens drawn at the position (WIRE §5.5).

Letters in shapes: P tokens of a prompt, N positions of one pass, k most probable tokens, K targets, D draws of a
position, V vocabulary, C = k + K + D columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from app.wire.types import AltTokens, PromptTargets, SampleRequest, TargetLogprobs
from workers.sample.engines.draw import GREEDY_BELOW, invert_many, stream, uniforms
from workers.sample.engines.probes import ALT_STREAM

ARGUMENT = "tinworks"
"""The name of the questions among vLLM's `extra_args`."""


@dataclass(frozen=True, slots=True, eq=False)
class Questions:
    """`targets`: int32 [P-1, K], a position's named tokens from the left, -1 where there is none. `stream` decides the
    draws, together with position and number."""

    k: int
    targets: np.ndarray | None = None
    draws: int = 0
    stream: int = 0
    temperature: float = 1.0

    @classmethod
    def of(cls, request: SampleRequest, vocab_size: int) -> Questions | None:
        """Those of a request; None if it asks nothing about its prompt, or the prompt has a single token, of which
        nothing can be said."""
        named, draws = request.target_prompt_logprobs, request.prompt_alt_tokens_k
        k = min(request.topk_prompt_logprobs, vocab_size)
        if len(request.prompt) < 2 or not (request.prompt_logprobs or k or named is not None or draws):
            return None
        return cls(
            k,
            None if named is None else _packed_left(named),
            draws,
            stream(request.params.seed, ALT_STREAM) if draws else 0,
            request.params.temperature,
        )

    @property
    def columns(self) -> int:
        """Columns beside that of the prompt's own token."""
        return self.k + (0 if self.targets is None else self.targets.shape[1]) + self.draws

    def packed(self) -> dict[str, Any] | None:
        """What the plugin has to know, of plain types; None if vLLM answers all by itself."""
        if self.columns == self.k:
            return None
        return {
            "k": self.k,
            "width": 0 if self.targets is None else self.targets.shape[1],
            "targets": b"" if self.targets is None else self.targets.tobytes(),
            "draws": self.draws,
            "stream": self.stream,
            "temperature": self.temperature,
        }

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> Questions:
        """The reverse of `packed`."""
        width = packed["width"]
        targets = np.frombuffer(packed["targets"], np.int32).reshape(-1, width) if width else None
        return cls(packed["k"], targets, packed["draws"], packed["stream"], packed["temperature"])

    def answers(self, logprobs_NV: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Ids int32 and logprobs float32 [N, K+D] of targets and draws at the positions `start` … `start + N - 1`,
        1 or more."""
        ids = []
        rows = slice(start - 1, start - 1 + len(logprobs_NV))
        if self.targets is not None:
            named_NK = torch.from_numpy(self.targets[rows].astype(np.int64)).to(logprobs_NV.device)
            ids.append(named_NK.clamp_(min=0))
        if self.draws:
            ids.append(self._drawn(rows, logprobs_NV))
        ids_NC = torch.cat(ids, 1)
        return ids_NC.int(), logprobs_NV.gather(1, ids_NC)

    def _drawn(self, rows: slice, logprobs_NV: Tensor) -> Tensor:
        if self.temperature < GREEDY_BELOW:
            return logprobs_NV.argmax(-1, keepdim=True).expand(-1, self.draws)
        numbers = np.arange(rows.start * self.draws, rows.stop * self.draws)
        unit = uniforms(np.full(len(numbers), self.stream, np.uint64), numbers).reshape(-1, self.draws)
        tempered_NV = (logprobs_NV - logprobs_NV.amax(-1, keepdim=True)) / self.temperature
        return invert_many(torch.softmax(tempered_NV, -1), torch.from_numpy(unit).to(logprobs_NV.device))

    def named(self, targets: PromptTargets, logprobs: np.ndarray) -> TargetLogprobs:
        """The logprobs of a request's targets out of `logprobs` float32 [P-1, 1+C]."""
        tokens = np.asarray(targets.tokens, np.int64)
        found = logprobs[targets.cell_rows(), 1 + self.k + _place_in_row(targets)].astype(np.float32)
        return TargetLogprobs(targets, np.where(tokens >= 0, found, np.float32(0)))

    def alternatives(self, ids: np.ndarray, logprobs: np.ndarray) -> AltTokens:
        """The draws out of ids and `logprobs` [P-1, 1+C]."""
        last = slice(1 + self.columns - self.draws, 1 + self.columns)
        return AltTokens(ids[:, last].astype(np.int64), logprobs[:, last].astype(np.float32))


def _place_in_row(targets: PromptTargets) -> np.ndarray:
    """How many cells of its row come before each, int64."""
    rows = targets.cell_rows()
    starts = np.searchsorted(rows, rows)
    place: np.ndarray = np.arange(len(rows)) - starts
    return place


def _packed_left(targets: PromptTargets) -> np.ndarray:
    """int32 [P-1, K]: each row's cells side by side. Raises ValueError if no token is named."""
    tokens = np.asarray(targets.tokens, np.int64)
    if not (tokens >= 0).any():
        raise ValueError("target_prompt_logprobs.data: names no token")
    place = _place_in_row(targets)
    packed = np.full((targets.shape[0], int(place.max()) + 1), -1, np.int32)
    packed[targets.cell_rows(), place] = tokens
    return packed
