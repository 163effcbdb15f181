"""Tokens that a request names at the positions of its prompt, and their logprobs by a plain loop."""

from __future__ import annotations

import numpy as np
import torch

from app.wire.types import PromptTargets
from tests.engine_suite.models import VOCAB


def dense(length: int, columns: int, seed: int, vocab_size: int = VOCAB) -> PromptTargets:
    """A matrix for a prompt of `length` tokens; about 30 % of its cells are -1."""
    rng = np.random.default_rng([length, columns, seed])
    cells = rng.integers(0, vocab_size, (length - 1, columns))
    cells[rng.random(cells.shape) > 0.7] = -1
    cells[-1, -1] = 7
    return PromptTargets((length - 1, columns), cells.ravel().tolist())


def sparse(matrix: PromptTargets) -> PromptTargets:
    """The same in CSR form, where every second cell of -1 is listed all the same."""
    cells = np.array(matrix.tokens).reshape(matrix.shape)
    listed = (cells >= 0) | (np.arange(cells.size).reshape(cells.shape) % 2 == 0)
    rows = [0, *np.cumsum(listed.sum(1)).tolist()]
    return PromptTargets(matrix.shape, cells[listed].tolist(), rows, np.nonzero(listed)[1].tolist())


def expected_targets(table: torch.Tensor, targets: PromptTargets) -> np.ndarray:
    """One logprob for each listed cell, 0 for -1. `table` [P, V]: row i is the distribution after token i."""
    rows = targets.rows or range(0, len(targets.tokens) + 1, targets.shape[1])
    found = np.zeros(len(targets.tokens))
    for row in range(targets.shape[0]):
        for cell in range(rows[row], rows[row + 1]):
            if targets.tokens[cell] >= 0:
                found[cell] = table[row, targets.tokens[cell]]
    return found
