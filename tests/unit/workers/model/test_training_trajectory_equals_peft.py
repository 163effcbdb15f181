"""Several steps of two runs, batched together, against PEFT and torch.optim run alone."""

import torch

from app.wire.types import AdamParams
from tests.unit.workers.model import model_reference as reference
from workers.model.base import BaseModel
from workers.model.forward import Work, run_pass
from workers.model.optim import AdamState, optimizer_step

STEPS = 5


def test_trajectories_equal(base: BaseModel) -> None:
    params = AdamParams(learning_rate=2e-3, eps=1e-6, weight_decay=0.01, grad_clip_norm=5.0)
    adapters = [reference.random_adapter(base, 1, rank=3), reference.random_adapter(base, 2, rank=6, train_mlp=False)]
    peft = [reference.PeftReference(base.name_or_path, adapter) for adapter in adapters]
    states = [AdamState.zeros(adapter) for adapter in adapters]
    optimizers = [
        torch.optim.AdamW(p.parameters.values(), lr=2e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01) for p in peft
    ]
    for step in range(STEPS):
        data = [reference.random_data(10 * step + i, [9, 17, 4]) for i in range(2)]
        works = [Work(adapter, d, "cross_entropy") for adapter, d in zip(adapters, data, strict=True)]
        run_pass(base, works, micro_batch_tokens=64)
        optimizer_step([(adapter, state, params) for adapter, state in zip(adapters, states, strict=True)])
        for i in range(2):
            optimizers[i].zero_grad()
            peft[i].backward(data[i])
            torch.nn.utils.clip_grad_norm_(peft[i].parameters.values(), 5.0)
            optimizers[i].step()
    for adapter, theirs in zip(adapters, peft, strict=True):
        reference.assert_close(adapter.state(), {n: p.detach() for n, p in theirs.parameters.items()}, 1e-5)
