"""Drawing tokens: temperature, top-k, top-p, and random numbers that belong to a sequence and not to its batch.

The number that decides the token at position p of sequence i is a hash of (seed, i, p), so that it depends neither on
the other rows of the batch nor on the order in which they came (SEMANTICS §6). It picks the token by inverting the
distribution's cumulative sum in float64.

Letters in shapes: B rows, V vocabulary, F rows with a filter,
W the most probable tokens looked at, K draws of a row.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from app.wire.types import SamplingParams

MASK_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

GREEDY_BELOW = 1e-5
"""A temperature lower than this is greedy: the quotient of two logits would leave float32."""

NARROW = 256
"""Top-p looks at this many of the most probable tokens first, and at all only if they are not enough."""


def mix(z: int) -> int:
    """SplitMix64's finalizer (Steele, Lea & Flood 2014), a bijection of 64-bit integers."""
    z = ((z ^ (z >> 30)) * MIX_1) & MASK_64
    z = ((z ^ (z >> 27)) * MIX_2) & MASK_64
    return z ^ (z >> 31)


def stream(seed: int | None, index: int) -> int:
    """The 64-bit stream of sequence `index` (-1 or more) of a request; without a seed, a fresh one. Any integer is a
    seed, modulo 2^64."""
    if seed is None:
        return secrets.randbits(64)
    return mix((mix((seed + GOLDEN) & MASK_64) + (index + 1) * GOLDEN) & MASK_64)


def uniforms(streams_B: np.ndarray, positions_B: np.ndarray) -> np.ndarray:
    """uint64 [B] and int64 [B] → float64 [B] in [0, 1): a multiple of 2^-52, so that its product with a sum stays below
    it."""
    z = streams_B + (positions_B.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    for _ in range(2):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
        z = z ^ (z >> np.uint64(31))
    unit: np.ndarray = (z >> np.uint64(12)).astype(np.float64) * 2.0**-52
    return unit


@dataclass(frozen=True, slots=True, eq=False)
class Filter:
    """The rows that draw from a part of the vocabulary. `rows` int64 [F]; `top_k` int64 [F], V where off; `top_p`
    float64 [F]."""

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    width: int
    """How many tokens contain every row's top k; `NARROW` or V where a row has none."""
    exact: bool
    """Whether every row has a top k, so that `width` tokens are enough for sure."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Filter | None:
        """The filter of a batch, None if no row has one."""
        found = [
            (row, p.top_k if 0 < p.top_k < vocab_size else vocab_size, p.top_p)
            for row, p in enumerate(params)
            if p.temperature >= GREEDY_BELOW and (0 < p.top_k < vocab_size or p.top_p < 1)
        ]
        if not found:
            return None
        rows, top_k, top_p = zip(*found, strict=True)
        exact = max(top_k) < vocab_size
        limited = [k for k in top_k if k < vocab_size]
        width = max(limited) if exact else min(vocab_size, max([NARROW, *limited]))
        return cls(
            torch.tensor(rows, device=device),
            torch.tensor(top_k, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            width,
            exact or width == vocab_size,
        )


@dataclass(frozen=True, slots=True, eq=False)
class DrawPlan:
    """How the rows of one batch draw: all that stays the same while its composition does."""

    streams: np.ndarray
    """uint64 [B]."""
    temperature_B1: Tensor | None
    """None if 1 everywhere. Greedy rows have 1."""
    greedy_B: Tensor | None
    """None if no row is greedy."""
    all_greedy: bool
    filter: Filter | None

    @classmethod
    def of(
        cls, params: Sequence[SamplingParams], streams: Sequence[int], vocab_size: int, device: torch.device
    ) -> DrawPlan:
        """`params` and `streams`: one of each per row."""
        greedy = [p.temperature < GREEDY_BELOW for p in params]
        temperature = [1.0 if g else p.temperature for g, p in zip(greedy, params, strict=True)]
        tempered = any(t != 1.0 for t in temperature)
        return cls(
            np.array(streams, dtype=np.uint64),
            torch.tensor(temperature, device=device).unsqueeze(1) if tempered else None,
            torch.tensor(greedy, device=device) if any(greedy) else None,
            all(greedy),
            Filter.of(params, vocab_size, device),
        )


def draw(logits_BV: Tensor, plan: DrawPlan, positions_B: np.ndarray) -> Tensor:
    """`logits_BV` float32, `positions_B` int64: how many tokens each sequence has drawn before → token ids int64
    [B]."""
    if plan.all_greedy:
        return logits_BV.argmax(-1)
    unit_B = torch.from_numpy(uniforms(plan.streams, positions_B)).to(logits_BV.device)
    if plan.temperature_B1 is not None:
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / plan.temperature_B1
    if plan.filter is None:
        tokens_B = invert(torch.softmax(logits_BV, -1), unit_B)
    elif len(plan.filter.rows) == len(logits_BV):
        tokens_B = draw_filtered(logits_BV, unit_B, plan.filter)
    else:
        rows = plan.filter.rows
        tokens_B = invert(torch.softmax(logits_BV, -1), unit_B)
        tokens_B[rows] = draw_filtered(logits_BV[rows], unit_B[rows], plan.filter)
    if plan.greedy_B is not None:
        tokens_B = torch.where(plan.greedy_B, logits_BV.argmax(-1), tokens_B)
    return tokens_B


def invert(probs_BV: Tensor, unit_B: Tensor) -> Tensor:
    """The first index at which the cumulative sum of `probs_BV` (any scale) exceeds `unit_B` of its total, int64
    [B]."""
    return invert_many(probs_BV, unit_B.unsqueeze(1)).squeeze(1)


def invert_many(probs_BV: Tensor, unit_BK: Tensor) -> Tensor:
    """The same for K numbers per row, int64 [B, K]."""
    total_BV = torch.cumsum(probs_BV, -1, dtype=torch.float64)
    index_BK: Tensor = torch.searchsorted(total_BV, unit_BK * total_BV[:, -1:], right=True)
    return index_BK.clamp_(max=probs_BV.shape[-1] - 1)


def draw_filtered(logits_FV: Tensor, unit_F: Tensor, filtered: Filter) -> Tensor:
    """Draw from each row's top k tokens, and of these from the smallest set whose share of their mass reaches top p."""
    ranked_FW = torch.topk(logits_FV, filtered.width, dim=-1)
    total_F1 = torch.logsumexp(logits_FV, -1, keepdim=True)
    tokens_F, enough_F = draw_ranked(*ranked_FW, total_F1, unit_F, filtered.top_k, filtered.top_p)
    if not filtered.exact:
        short = (~enough_F & (filtered.top_k == logits_FV.shape[1])).nonzero().squeeze(1)
        if len(short):
            ranked_FV = torch.sort(logits_FV[short], dim=-1, descending=True)
            top_k, top_p = filtered.top_k[short], filtered.top_p[short]
            tokens_F[short] = draw_ranked(*ranked_FV, total_F1[short], unit_F[short], top_k, top_p)[0]
    return tokens_F


def draw_ranked(
    logits_FW: Tensor, ids_FW: Tensor, total_F1: Tensor, unit_F: Tensor, top_k_F: Tensor, top_p_F: Tensor
) -> tuple[Tensor, Tensor]:
    """The same from the W most probable tokens, most probable first. `total_F1`: log-sum-exp of all logits.

    Returns token ids int64 [F], and whether the W tokens contain the set that top p asks for, bool [F]; a top k ≤ W
    does.
    """
    probs_FW = torch.exp(logits_FW - total_F1).double()
    probs_FW = probs_FW.masked_fill_(torch.arange(ids_FW.shape[1], device=ids_FW.device) >= top_k_F.unsqueeze(1), 0)
    up_to_FW = torch.cumsum(probs_FW, -1)
    mass_F1 = torch.where(top_k_F.unsqueeze(1) > ids_FW.shape[1], 1.0, up_to_FW[:, -1:])
    top_p_F1 = top_p_F.unsqueeze(1)
    outside_FW = (up_to_FW - probs_FW >= top_p_F1 * mass_F1) & (top_p_F1 < 1)
    outside_FW[:, 0] = False
    choice_F = invert(probs_FW.masked_fill_(outside_FW, 0), unit_F)
    return ids_FW.gather(1, choice_F.unsqueeze(1)).squeeze(1), up_to_FW[:, -1] >= top_p_F
