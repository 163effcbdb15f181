"""A worker whose model cannot carry LoRA, or cannot do what its role is, ends with a message instead of idling."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from app.db import get_database
from app.settings import get_settings
from tests.unit.workers.model.families import plain
from workers import process


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=32))


def hybrid() -> PreTrainedModel:
    return plain("qwen3.5")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the model of a worker that starts here is."""
    monkeypatch.setenv("TINWORKS_BASE_MODEL", str(tmp_path / "model"))
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path / 'db.sqlite'}")
    threads, interval = torch.get_num_threads(), sys.getswitchinterval()
    for cached in (get_settings, get_database):
        cached.cache_clear()
    yield tmp_path / "model"
    for cached in (get_settings, get_database):
        cached.cache_clear()
    torch.set_num_threads(threads)
    sys.setswitchinterval(interval)


@pytest.mark.parametrize(
    ("build", "role", "message"),
    [
        (gpt2, "train", r"a train worker of .*: transformer\.h\.0\.attn\.c_attn \(Conv1D\) cannot carry LoRA"),
        (hybrid, "sample", r"a sample worker of .*: Qwen3_5ForCausalLM has linear_attention layers"),
    ],
)
def test_the_process_ends_and_says_why(
    build: Callable[[], PreTrainedModel], role: str, message: str, folder: Path
) -> None:
    build().save_pretrained(folder)
    with pytest.raises(SystemExit, match=message):
        process.start((role,))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_setting_that_this_machine_cannot_follow_ends_the_process(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain("qwen3").save_pretrained(folder)
    monkeypatch.setenv("TINWORKS_ATTENTION", "flash")
    with pytest.raises(SystemExit, match="TINWORKS_ATTENTION=flash: it needs CUDA"):
        process.start(("train",))
