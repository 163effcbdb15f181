"""What is known of a model without its weights is what is known with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config

from app.wire.types import LoraConfig
from tests.unit.workers.model.families import plain
from workers.model.base import BaseModel, UnsupportedModel
from workers.model.export import peft_files
from workers.model.tiny import make_tiny_model
from workers.snapshot_files import BadSnapshot
from workers.train.snapshots import read_adapter_folder

FAMILIES = ("qwen3", "llama3", "gemma3-that-sees", "qwen3-moe", "deepseek-v3", "gpt-oss", "qwen3.5-moe")


def saved(family: str, folder: Path) -> Path:
    plain(family).save_pretrained(folder)
    return folder


def written(base: BaseModel, folder: Path, **options: int) -> Path:
    """An adapter's files."""
    folder.mkdir()
    adapter = base.new_adapter(LoraConfig(**{"rank": 4, "seed": 1, **options}))
    for name, data in peft_files(adapter, "base", base).items():
        (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_facts_and_targets_are_those_of_the_loaded_model(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path / "model")
    base, outline = BaseModel.load(folder, device="cpu"), BaseModel.outline(folder, dtype=torch.float32)
    assert outline.facts == base.facts
    assert outline.targets == base.targets
    assert outline.device.type == "meta"


def test_the_end_of_sequence_and_the_tokenizer_are_read(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "tiny")
    base, outline = (
        BaseModel.load(tmp_path / "tiny", device="cpu"),
        BaseModel.outline(tmp_path / "tiny", dtype=torch.float32),
    )
    assert outline.eos_token_ids == base.eos_token_ids
    assert len(outline.eos_token_ids) == 2
    assert outline.tokenizer().decode([70, 71]) == base.tokenizer().decode([70, 71])


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_an_adapter_fits_the_outline_if_it_fits_the_model(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path / "model")
    base, outline = BaseModel.load(folder, device="cpu"), BaseModel.outline(folder, dtype=torch.float32)
    own = written(base, tmp_path / "own", rank=3)
    assert read_adapter_folder(own, outline).config.rank == 3
    other = written(BaseModel(plain("deepseek-v3"), "other"), tmp_path / "other")
    with pytest.raises(BadSnapshot):
        read_adapter_folder(other, outline)


def test_a_model_that_cannot_carry_lora_is_refused(tmp_path: Path) -> None:
    GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, architectures=["GPT2LMHeadModel"]).save_pretrained(
        tmp_path
    )
    with pytest.raises(UnsupportedModel):
        BaseModel.outline(tmp_path, dtype=torch.float32)
