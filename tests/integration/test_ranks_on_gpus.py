"""On CUDA devices: no device ever holds the whole model, not while it loads either, and passes are those of one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from app.wire.types import ForwardBackwardOutput
from tests.integration.ranks import MICRO_BATCH_TOKENS, ranks
from tests.unit.workers.model import model_reference as reference
from workers.model.base import BaseModel
from workers.model.engine import SoloEngine
from workers.model.forward import Work

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def big_model(folder: Path) -> int:
    """A quarter of a gigabyte; returns its size in bytes."""
    config = Qwen3Config(
        hidden_size=1024,
        num_hidden_layers=8,
        intermediate_size=3072,
        vocab_size=reference.VOCAB,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=256,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def test_two_devices_share_a_model(tmp_path: Path) -> None:
    size = big_model(tmp_path)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with ranks(2, tmp_path) as engine:
        assert torch.cuda.max_memory_allocated() - before < 0.75 * size
        data = reference.random_data(1, [60, 7, 31, 2, 18])
        mine = Work(reference.random_adapter(engine.base, 1), data, "cross_entropy")
        (output,) = engine.run_pass([mine])
        engine.collect_gradients([mine.adapter])
    solo = SoloEngine(BaseModel.load(tmp_path, dtype=torch.float32), micro_batch_tokens=MICRO_BATCH_TOKENS)
    alone = Work(reference.random_adapter(solo.base, 1), data, "cross_entropy")
    (expected,) = solo.run_pass([alone])
    assert isinstance(output, ForwardBackwardOutput) and isinstance(expected, ForwardBackwardOutput)
    for a, b in zip(output.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-4)
    assert float((mine.adapter.grad_flat - alone.adapter.grad_flat).norm()) <= 1e-4 * float(
        alone.adapter.grad_flat.norm()
    )
