"""Logprobs of a prompt's own tokens, the most probable tokens at its positions, and what probes find out there
(SEMANTICS §6, WIRE §4.3).

Letters in shapes: B prompts, L tokens of one pass, P tokens of a prompt, N scored tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from app.wire.types import NO_TOKEN_LOGPROB, SampledSequence, SampleRequest, SampleResult, TopK
from workers.model.lora import Adapter
from workers.sample.engines.forward import Forward, route
from workers.sample.engines.probes import AltProbe, Probe, TargetProbe

MAX_LOGITS = 1 << 24
"""Logits made at a time: 64 MiB of them."""


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """What a request wants to know about its prompt, filled in as the prompt passes through the model.

    `first`: the first position whose own token or top k is scored. `logprobs` float32 [P], NaN before it.
    """

    first: int
    logprobs: np.ndarray | None
    topk: TopK | None
    targets: TargetProbe | None = None
    alternatives: AltProbe | None = None

    @classmethod
    def of(cls, request: SampleRequest) -> PromptScores | None:
        """None if the request asks for nothing of the kind. Raises ValueError for targets that name no token."""
        length, k = len(request.prompt), request.topk_prompt_logprobs
        named, draws = request.target_prompt_logprobs, request.prompt_alt_tokens_k
        own = request.prompt_logprobs or k > 0
        if not (own or named is not None or draws > 0):
            return None
        last_n = length if request.prompt_logprobs_last_n is None else request.prompt_logprobs_last_n
        return cls(
            max(1, length - last_n) if own else length,
            np.full(length, np.nan, np.float32) if request.prompt_logprobs else None,
            empty_topk(length, k) if k > 0 else None,
            None if named is None else TargetProbe(named),
            AltProbe(request) if draws > 0 else None,
        )

    @property
    def probes(self) -> list[Probe]:
        """Those that it has."""
        return [probe for probe in (self.targets, self.alternatives) if probe is not None]

    @property
    def begin(self) -> int:
        """The first position of which anything is wanted."""
        return min([self.first, *(probe.first for probe in self.probes)])

    @property
    def k(self) -> int:
        """How many of the most probable tokens."""
        return 0 if self.topk is None else self.topk.token_ids.shape[1]

    def fill(self, start: int, scored: Scored) -> None:
        """Take the scores of positions `start` … of the prompt, as far as they are wanted."""
        skip = max(0, self.first - start)
        rows = slice(start + skip, start + len(scored.logprobs))
        if rows.start >= rows.stop:
            return
        if self.logprobs is not None:
            self.logprobs[rows] = scored.logprobs[skip:]
        if self.topk is not None and scored.topk is not None:
            k = min(self.k, scored.topk.token_ids.shape[1])
            self.topk.token_ids[rows, :k] = scored.topk.token_ids[skip:, :k]
            self.topk.logprobs[rows, :k] = scored.topk.logprobs[skip:, :k]

    def result(self, sequences: Sequence[SampledSequence], cache_hit_tokens: int) -> SampleResult:
        """The request's answer."""
        return SampleResult(
            sequences,
            self.logprobs,
            self.topk,
            cache_hit_tokens,
            None if self.targets is None else self.targets.result(),
            None if self.alternatives is None else self.alternatives.result(),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """`logprobs` float32 [N] of N tokens, and the top k [N, k] at their positions."""

    logprobs: np.ndarray
    topk: TopK | None

    def __getitem__(self, rows: slice) -> Scored:
        topk = None if self.topk is None else TopK(self.topk.token_ids[rows], self.topk.logprobs[rows])
        return Scored(self.logprobs[rows], topk)


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """The tokens of row `row` of a pass that are scored: prompt positions `start` … `start + len(tokens) - 1`, the
    hidden states that predict them at `column` … of the pass. `probes` see them too."""

    row: int
    column: int
    start: int
    tokens: np.ndarray
    adapter: Adapter | None
    probes: Sequence[Probe] = ()

    @classmethod
    def of(
        cls,
        row: int,
        prompt: np.ndarray,
        first: int,
        offset: int,
        length: int,
        adapter: Adapter | None,
        probes: Sequence[Probe] = (),
    ) -> Span | None:
        """The part of `prompt`, scored from position `first` on, that a pass over its tokens `offset` …
        `offset+length-1` predicts; None if there is none."""
        start, stop = max(first, offset + 1), min(len(prompt), offset + length + 1)
        return cls(row, start - 1 - offset, start, prompt[start:stop], adapter, probes) if start < stop else None

    def show(self, skipped: int, logprobs_NV: Tensor) -> None:
        """Let its probes see its tokens from number `skipped` on; `logprobs_NV` begins with that one's."""
        for probe in self.probes if skipped < len(self.tokens) else ():
            probe.see(self.start + skipped, logprobs_NV[: len(self.tokens) - skipped])


def score(forward: Forward, hidden_BLD: Tensor, spans: Sequence[Span], k: int) -> list[Scored]:
    """The scores of each span, in chunks of at most `MAX_LOGITS` logits. `spans` lie ordered by adapter."""
    if not spans:
        return []
    length = hidden_BLD.shape[1]
    flat_TD = hidden_BLD.reshape(-1, hidden_BLD.shape[2])
    counts = [len(span.tokens) for span in spans]
    index_N = np.concatenate([s.row * length + s.column + np.arange(n) for s, n in zip(spans, counts, strict=True)])
    index = torch.from_numpy(index_N).to(flat_TD.device)
    tokens = torch.from_numpy(np.concatenate([span.tokens for span in spans])).to(flat_TD.device)
    adapters = [span.adapter for span, n in zip(spans, counts, strict=True) for _ in range(n)]
    chunks = []
    starts = [0, *np.cumsum(counts).tolist()]
    step = max(1, MAX_LOGITS // forward.vocab_size)
    for begin in range(0, len(index), step):
        rows = slice(begin, begin + step)
        logprobs_NV = torch.log_softmax(forward.logits(flat_TD[index[rows]], route(adapters[rows])), -1)
        chunks.append(scored(logprobs_NV, tokens[rows], k))
        for span, start in zip(spans, starts, strict=False):
            if span.probes and start < begin + len(logprobs_NV):
                span.show(max(0, begin - start), logprobs_NV[max(0, start - begin) :])
    whole = joined(chunks)
    return [whole[start : start + n] for start, n in zip(starts, counts, strict=False)]


def scored(logprobs_NV: Tensor, tokens_N: Tensor, k: int) -> Scored:
    """Pick the tokens' logprobs and the top k out of all."""
    logprobs_N = logprobs_NV.gather(1, tokens_N.unsqueeze(1)).squeeze(1)
    return Scored(logprobs_N.cpu().numpy(), top(logprobs_NV, k) if k else None)


def top(logprobs_NV: Tensor, k: int) -> TopK:
    """The `k` (or V) most probable tokens of each row, most probable first."""
    logprobs, ids = torch.topk(logprobs_NV, min(k, logprobs_NV.shape[1]), dim=-1)
    return TopK(ids.int().cpu().numpy(), logprobs.cpu().numpy())


def joined(chunks: Sequence[Scored]) -> Scored:
    """One after the other."""
    parts = [chunk.topk for chunk in chunks if chunk.topk is not None]
    topk = None
    if parts:
        topk = TopK(np.concatenate([p.token_ids for p in parts]), np.concatenate([p.logprobs for p in parts]))
    return Scored(np.concatenate([chunk.logprobs for chunk in chunks]), topk)


def empty_topk(rows: int, k: int) -> TopK:
    """A `TopK` that says nothing yet."""
    return TopK(np.zeros((rows, k), np.int32), np.full((rows, k), NO_TOKEN_LOGPROB, np.float32))
