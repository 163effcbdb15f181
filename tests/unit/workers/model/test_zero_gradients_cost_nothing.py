"""Weights of zero: logprobs as ever, no gradient, and no backward pass."""

import numpy as np
import pytest

from app.wire.types import Datum
from tests.unit.workers.model import model_reference as reference
from workers.model import lora
from workers.model.base import BaseModel
from workers.model.forward import Work


def test_all_zero_weights(qwen: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    data = reference.random_data(1, [6, 9])
    silent = [Datum(d.tokens, {**d.inputs, "weights": np.zeros(len(d.tokens), np.float32)}) for d in data]
    expected = reference.run_one(qwen, Work(reference.random_adapter(qwen, 1), data, "cross_entropy"))
    adapter = reference.random_adapter(qwen, 1)
    calls: list[int] = []
    monkeypatch.setattr(lora, "add_term_grads", lambda *_: calls.append(1))
    output = reference.run_one(qwen, Work(adapter, silent, "cross_entropy"))
    assert output.metrics["loss:sum"] == 0
    assert not adapter.grad_flat.any() and adapter.has_grad
    assert calls == []
    for a, b in zip(output.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-5)
