"""Which live sampler a prompt belongs to: the one that is likely to have its beginning cached. Pure.

Each worker gets a weight from a hash of the prompt's beginning and of its own name, and the heaviest is the prompt's
home (highest random weight hashing; Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998).
Whoever routes comes to the same answer, and when a worker comes or goes, only its own share of the prompts moves.

A home that has too much to do is passed over for the next in the prompt's order (bounded loads; Mirrokni, Thorup and
Zadimoghaddam, "Consistent hashing with bounded loads", 2018), so that many prompts with one beginning spread as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy as np

LOAD_FACTOR = 1.25
"""A worker takes no more while it has more than so many times the average."""
LOAD_SLACK = 64
"""Sequences above that which are always taken: so many decode together at little more than the price of one."""


def prefix_key(snapshot_id: str | None, prompt: Sequence[int], *, tokens: int) -> bytes:
    """Equal for samples that can share the keys and values of their prompts' first `tokens` tokens: those of one
    adapter (None: of the base model) that begin with the same ones. A shorter prompt counts whole."""
    whose = blake2b((snapshot_id or "").encode(), digest_size=16).digest()
    return blake2b(np.asarray(prompt[:tokens], "<i4").tobytes(), digest_size=16, key=whose).digest()


def by_weight(key: bytes, workers: Sequence[str]) -> list[str]:
    """The workers in this key's order: its home first."""
    return sorted(workers, key=lambda worker_id: (_weight(key, worker_id), worker_id), reverse=True)


def choose(key: bytes, loads: Mapping[str, int]) -> str:
    """Where a request goes. `loads`: sequences that each live worker has to do, of one worker at least."""
    limit = LOAD_FACTOR * sum(loads.values()) / len(loads) + LOAD_SLACK
    home = max(loads, key=lambda worker_id: (_weight(key, worker_id), worker_id))
    if loads[home] < limit:
        return home
    return next(worker_id for worker_id in by_weight(key, list(loads)) if loads[worker_id] < limit)


def _weight(key: bytes, worker_id: str) -> bytes:
    return blake2b(worker_id.encode(), digest_size=8, key=key).digest()
