"""Engines of several ranks over gloo: this process is rank 0, the others are real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from workers.model.ranks.leader import ShardedEngine
from workers.model.ranks.placement import Placement
from workers.model.ranks.start import lead

MICRO_BATCH_TOKENS = 64


class RanksLost(BaseException):
    """What ends a worker's process."""


@contextmanager
def ranks(world: int, source: Path) -> Iterator[ShardedEngine]:
    """An engine of `world` ranks. There can be one at a time."""
    lost: list[object] = []
    torch.set_num_threads(1)
    engine = lead(
        Placement(0, world, 0, world),
        source=str(source),
        dtype=None,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        threads=1,
        timeout_s=60.0,
        on_lost=lost.append,
    )
    yield engine
    engine.close()
    assert not lost
