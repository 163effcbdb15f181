"""Ranks that pack their sequences and recompute their layers give what one process gives that does neither."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from app.wire.types import ForwardBackwardOutput
from tests.integration.ranks import MICRO_BATCH_TOKENS, ranks
from tests.unit.workers.model import model_reference as reference
from tests.unit.workers.model.families import plain
from workers.model.base import BaseModel
from workers.model.engine import Engine, SoloEngine
from workers.model.forward import Work
from workers.model.preparation import Preparation


def computed(engine: Engine) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Log-probabilities and gradients of two runs whose datums are not spread evenly."""
    adapters = [reference.random_adapter(engine.base, i, rank=rank) for i, rank in enumerate((2, 9))]
    lengths = ([30, 4, 17, 60], [1])
    works = [
        Work(adapter, reference.random_data(i, mine), "cross_entropy")
        for i, (adapter, mine) in enumerate(zip(adapters, lengths, strict=True))
    ]
    outputs = engine.run_pass(works)
    engine.collect_gradients(adapters)
    logprobs = []
    for output in outputs:
        assert isinstance(output, ForwardBackwardOutput), output
        logprobs += [each["logprobs"] for each in output.loss_fn_outputs]
    return logprobs, [adapter.grad_flat.numpy().copy() for adapter in adapters]


def test_packed_and_checkpointed_ranks_compute_as_one_plain_process(tmp_path: Path) -> None:
    plain("gemma3").save_pretrained(tmp_path)
    alone = computed(SoloEngine(BaseModel.load(tmp_path), micro_batch_tokens=MICRO_BATCH_TOKENS))
    with ranks(2, tmp_path, Preparation("dense", "on")) as engine:
        assert engine.base.attention == "dense"
        together = computed(engine)
    for mine, theirs in zip(*(found[0] for found in (together, alone)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
    for mine, theirs in zip(*(found[1] for found in (together, alone)), strict=True):
        assert np.linalg.norm(mine - theirs) <= 1e-5 * np.linalg.norm(theirs)
