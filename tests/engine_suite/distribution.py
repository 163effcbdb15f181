"""What a distribution should be, by hand in float64, and whether draws follow it."""

from __future__ import annotations

import math

import numpy as np

from app.wire.types import SamplingParams

EXPECTED_AT_LEAST = 5.0


def processed(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """The distribution [V] that a request draws from: temperature, then top-k, then top-p on what is left, by a plain
    loop."""
    weights = np.exp((logits - logits.max()) / p.temperature)
    order = np.argsort(-weights, kind="stable")
    if p.top_k > 0:
        weights[order[p.top_k :]] = 0
    weights /= weights.sum()
    mass = 0.0
    for token in order:
        if mass >= max(p.top_p, 1e-9) and p.top_p < 1:
            weights[token] = 0
        mass += weights[token]
    return weights / weights.sum()


def assert_follows(tokens: np.ndarray, distribution: np.ndarray) -> None:
    """Pearson's chi-square within five standard deviations, unlikely tokens together in one cell, and nothing of
    probability zero."""
    counts = np.bincount(tokens, minlength=len(distribution)).astype(float)
    assert counts[distribution == 0].sum() == 0
    expected = distribution * len(tokens)
    likely = expected >= EXPECTED_AT_LEAST
    rest = expected[~likely].sum()
    counts, expected = (np.append(array[likely], array[~likely].sum()) for array in (counts, expected))
    if rest < EXPECTED_AT_LEAST:
        counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = max(1, len(expected) - 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom), (statistic, freedom)
