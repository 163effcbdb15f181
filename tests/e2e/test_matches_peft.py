"""What the service trains is what plain transformers + PEFT + torch.optim train, and what it saves loads in PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import tinker
import torch
from peft import PeftModel
from sqlalchemy import select
from tinker import types
from transformers import AutoModelForCausalLM

from app.checkpoints.models import Checkpoint
from app.db import Database
from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, logprobs, train
from workers import snapshot_files

DATA = batch(51, [33, 7, 20])


def _files_of(service, name: str) -> Path:  # type: ignore[no-untyped-def]
    with Database(service.database_url).read() as session:
        snapshot_id = session.scalar(select(Checkpoint.snapshot_id).where(Checkpoint.name == name))
    folder = Path(service.data_dir) / "of-peft" / str(snapshot_id)
    folder.mkdir(parents=True)
    for file, data in snapshot_files.read(service.blobs(), str(snapshot_id)).items():
        (folder / file).write_bytes(data)
    return folder


def _reference_logprobs(model: torch.nn.Module, data: list[types.Datum]) -> list[torch.Tensor]:
    rows = []
    for each in data:
        tokens = torch.tensor([each.model_input.to_ints()])
        targets = torch.tensor(list(each.loss_fn_inputs["target_tokens"].data))
        logits = model(input_ids=tokens).logits[0].float()
        rows.append(torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0])
    return rows


def test_trained_weights_equal_a_plain_peft_loop(service, client: tinker.ServiceClient) -> None:  # type: ignore[no-untyped-def]
    steps, lr = 6, 2e-3
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=9).result(30)
    folder = _files_of_fresh(service, run)
    base = AutoModelForCausalLM.from_pretrained(service.data_dir / "models" / "tiny", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder, is_trainable=True)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0
    )
    for _ in range(steps):
        loss = -torch.cat(_reference_logprobs(model, DATA)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    train(run, DATA, steps, lr=lr)
    with torch.no_grad():
        expected = _reference_logprobs(model, DATA)
    for got, want in zip(logprobs(run, DATA), expected, strict=True):
        assert got == pytest.approx(want.tolist(), abs=1e-4)


def _files_of_fresh(service, run: tinker.TrainingClient) -> Path:  # type: ignore[no-untyped-def]
    name = f"fresh-{run.model_id.split(':')[0][:8]}"
    run.save_weights_for_sampler(name).result(30)
    return _files_of(service, name)


def test_a_saved_adapter_gives_the_same_logprobs_in_peft(service, client: tinker.ServiceClient) -> None:  # type: ignore[no-untyped-def]
    run = client.create_lora_training_client(base_model=MODEL, rank=16, seed=10).result(30)
    train(run, DATA, 5)
    folder = _files_of_fresh(service, run)
    base = AutoModelForCausalLM.from_pretrained(service.data_dir / "models" / "tiny", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder)
    with torch.no_grad():
        expected = _reference_logprobs(model, DATA)
    for got, want in zip(logprobs(run, DATA), expected, strict=True):
        assert got == pytest.approx(want.tolist(), abs=1e-4)
