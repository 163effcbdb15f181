"""Engines of several ranks over gloo: this process is rank 0, the others are real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from workers.model.preparation import Preparation
from workers.model.ranks.leader import ShardedEngine
from workers.model.ranks.placement import Placement
from workers.model.ranks.start import lead

MICRO_BATCH_TOKENS = 64


@contextmanager
def ranks(place: int | Placement, source: Path, preparation: Preparation | None = None) -> Iterator[ShardedEngine]:
    """An engine of so many ranks on this host, or of those that a placement says; in float32 on the CPU, or on as many
    CUDA devices. There can be one at a time.
    """
    if isinstance(place, int):
        place = Placement(0, place, 0, place)
    if 0 < torch.cuda.device_count() < place.local_world:
        pytest.skip(f"needs {place.local_world} CUDA devices, or none")
    lost: list[object] = []
    torch.set_num_threads(1)
    engine = lead(
        place,
        source=str(source),
        dtype=torch.float32,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        threads=1,
        timeout_s=60.0,
        preparation=preparation,
        on_lost=lost.append,
    )
    yield engine
    engine.close()
    assert not lost
