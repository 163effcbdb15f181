"""Engines of several ranks over gloo, and what they are given and compared with. This process is rank 0, the others
are real processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from app.wire.types import Datum, ForwardBackwardOutput
from tests.unit.workers.model import model_reference as reference
from tests.unit.workers.model.test_custom_losses_equal_the_clients import neg_ll, traced, uploaded
from workers.model.base import BaseModel
from workers.model.engine import Engine
from workers.model.forward import Work
from workers.model.lora import Adapter
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
        preparation=preparation or Preparation("padded", "off"),
        on_lost=lost.append,
    )
    try:
        yield engine
    finally:
        engine.close()
    assert not lost


def outputs(engine: Engine, works: Sequence[Work]) -> list[ForwardBackwardOutput]:
    outcomes = engine.run_pass(works)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes  # type: ignore[return-value]


def assert_same_outputs(mine: Sequence[ForwardBackwardOutput], alone: Sequence[ForwardBackwardOutput]) -> None:
    for a, b in zip(mine, alone, strict=True):
        assert a.metrics == pytest.approx(b.metrics, rel=1e-5, abs=1e-5, nan_ok=True)
        for x, y in zip(a.loss_fn_outputs, b.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(x["logprobs"], y["logprobs"], atol=1e-5)
            assert x["logprobs"].shape == y["logprobs"].shape and x["logprobs"].dtype == np.float32


def assert_same_gradients(engine: Engine, mine: Sequence[Adapter], alone: Sequence[Adapter]) -> None:
    engine.collect_gradients(mine)
    for a, b in zip(mine, alone, strict=True):
        assert a.has_grad == b.has_grad
        assert float((a.grad_flat - b.grad_flat).norm()) <= 1e-5 * float(b.grad_flat.norm())


def reinforced(seed: int, lengths: Sequence[int]) -> list[Datum]:
    """Datums for the losses of reinforcement learning."""
    draw = np.random.default_rng(seed)
    return [
        Datum(
            draw.integers(0, reference.VOCAB, n).astype(np.int32),
            {
                "target_tokens": draw.integers(0, reference.VOCAB, n),
                "logprobs": -draw.exponential(size=n).astype(np.float32),
                "advantages": draw.normal(size=n).astype(np.float32),
            },
        )
        for n in lengths
    ]


def many_kinds(base: BaseModel) -> list[Work]:
    """Works of many ranks, targets, losses and shapes, more than one micro-batch can hold."""
    new, data = reference.random_adapter, reference.random_data
    custom = uploaded(traced(neg_ll, logprobs=1, weights=1))
    return [
        Work(new(base, 1, 2), data(1, [6, 31, 3, 17, 8]), "cross_entropy"),
        Work(new(base, 2, 7, train_attn=False, train_mlp=False), data(2, [13], 3), "cross_entropy"),
        Work(new(base, 3, 1, train_unembed=False), reinforced(3, [20, 5, 5]), "ppo", {"clip_high_threshold": 1.1}),
        Work(new(base, 4, 4), data(4, [50]), "cross_entropy", {}, False),
        Work(new(base, 5, 3), data(5, [9, 4]), "custom", {"loss_id": "l"}, True, custom),
    ]
