"""New prompts' way through the model: passes over their tokens, their scores, and the first token of each sequence.

Letters in shapes: B prompts, L tokens of one pass, D hidden.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from workers.sample.engines.admission import Wave
from workers.sample.engines.batch import Drawer, Drawn
from workers.sample.engines.forward import Forward, route
from workers.sample.engines.kv_cache import KVPool, PrefillView
from workers.sample.engines.scores import Span, score


def keeps(wave: Wave, length: int) -> bool:
    """Whether a pass over `length` tokens has to leave keys and values behind: for the next pass, or for decoding."""
    return wave.offset > 0 or length < wave.length or any(s.limit > 1 for s in wave.sequences)


def prefill_pass(forward: Forward, pool: KVPool | None, wave: Wave, length: int) -> Tensor:
    """The next `length` tokens of all prompts of a wave → hidden [B, L, D]. Keys and values go to the wave's slots of
    `pool`."""
    offset = wave.offset
    tokens_BL = np.zeros((len(wave.prompts), length), np.int64)
    for row, prompt in enumerate(wave.prompts):
        part = prompt.tokens[offset : offset + length]
        tokens_BL[row, : len(part)] = part
    hidden_BLD = forward.prefill(
        torch.from_numpy(tokens_BL).to(forward.device),
        PrefillView(pool, wave.start, offset),
        offset,
        route((prompt.adapter for prompt in wave.prompts), length),
    )
    score_pass(forward, wave, hidden_BLD)
    wave.offset += length
    return hidden_BLD


def score_pass(forward: Forward, wave: Wave, hidden_BLD: Tensor) -> None:
    """Score what this pass predicts of the prompts, for the jobs that want it."""
    wanted, spans, k = [], [], 0
    for row, prompt in enumerate(wave.prompts):
        scores = [ticket.scores for ticket in prompt.tickets if ticket.scores is not None]
        if not scores:
            continue
        first = min(s.begin for s in scores)
        probes = [probe for s in scores for probe in s.probes]
        span = Span.of(row, prompt.tokens, first, wave.offset, hidden_BLD.shape[1], prompt.adapter, probes)
        if span is not None:
            wanted.append(scores)
            spans.append(span)
            k = max(k, *(s.k for s in scores))
    for scores, span, scored in zip(wanted, spans, score(forward, hidden_BLD, spans, k), strict=True):
        for s in scores:
            s.fill(span.start, scored)


def draw_first(forward: Forward, wave: Wave, hidden_BLD: Tensor) -> Drawn:
    """The first token of every sequence of a wave, out of the last pass over its prompts."""
    begin = wave.offset - hidden_BLD.shape[1]
    device = hidden_BLD.device
    last_B = torch.tensor([len(prompt.tokens) - 1 - begin for prompt in wave.prompts], device=device)
    hidden_BD = hidden_BLD[torch.arange(len(wave.prompts), device=device), last_B]
    logits_BV = forward.logits(hidden_BD, route(prompt.adapter for prompt in wave.prompts))
    sequences = wave.sequences
    if len(sequences) > len(wave.prompts):
        counts = torch.tensor([len(prompt.sequences) for prompt in wave.prompts], device=device)
        logits_BV = logits_BV.repeat_interleave(counts, dim=0)
    return Drawer(sequences, forward).draw(logits_BV, np.zeros(len(sequences), np.int64))
