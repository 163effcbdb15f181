"""Adapters merged into the files of their base model: what transformers loads computes what the trainer computes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from app.errors import InvalidRequest
from tests.unit.workers.model import model_reference as reference
from tests.unit.workers.model.families import FAMILIES, plain
from workers.export import export_merged
from workers.model import merging
from workers.model.adapter import Adapter
from workers.model.base import BaseModel
from workers.model.export import write_peft
from workers.model.lora import Routing, routed
from workers.model.merging import CannotMerge
from workers.model.weight_files import INDEX, BadWeightFiles

TOKENS = torch.arange(30).view(2, 15)
SMALL_SHARDS = 30_000

pytestmark = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*")


class Bench:
    """A base model's folder, an adapter's, and the trainer's own numbers."""

    def __init__(self, folder: Path, name: str, *, dtype: torch.dtype = torch.float32, **config: Any) -> None:
        self.folder, self.base_folder = folder, folder / "base"
        plain(name).to(dtype).save_pretrained(self.base_folder)
        (self.base_folder / "tokenizer.json").write_text("{}")
        (self.base_folder / "README.md").write_text("about the base")
        self.base = BaseModel(plain(name), name)
        self.adapter: Adapter = reference.random_adapter(self.base, 3, **config)
        self.adapter.flat.mul_(0.5)
        (folder / "adapter").mkdir()
        write_peft(self.adapter, name, self.base, folder / "adapter")
        self.told: list[tuple[int, int]] = []

    def export(self, *, shard_bytes: int = 10**9) -> Path:
        out = self.folder / "out"
        export_merged(
            self.folder / "adapter",
            self.base_folder,
            out,
            shard_bytes=shard_bytes,
            progress=lambda done, total: self.told.append((done, total)),
        )
        return out

    def logprobs(self) -> Tensor:
        routing = Routing.of([(self.adapter, 2)], row_tokens=15)
        with torch.no_grad(), routed(routing):
            return torch.log_softmax(self.base.lm_head(self.base.hidden(TOKENS)), -1)

    def weights(self) -> dict[str, Tensor]:
        return safetensors.torch.load_file(self.base_folder / "model.safetensors")

    def store(self, weights: Mapping[str, Tensor]) -> None:
        kept = {name: tensor.contiguous() for name, tensor in weights.items()}
        safetensors.torch.save_file(kept, self.base_folder / "model.safetensors", {"format": "pt"})


def loaded_logprobs(folder: Path) -> Tensor:
    """What plain transformers computes; it must use every tensor, and lack none."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        return torch.log_softmax(model(input_ids=TOKENS, use_cache=False).logits, -1)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_merged_model_gives_the_trainers_logprobs(tmp_path: Path, name: str) -> None:
    bench = Bench(tmp_path, name)
    out = bench.export(shard_bytes=SMALL_SHARDS)
    torch.testing.assert_close(loaded_logprobs(out), bench.logprobs(), atol=1e-5, rtol=0)
    assert len(json.loads((out / INDEX).read_text())["weight_map"]) > len(bench.weights()) - 1


@pytest.mark.parametrize("config", [{"train_attn": False}, {"train_mlp": False}, {"train_unembed": False}], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_groups_that_were_not_trained_stay_as_they_are(tmp_path: Path, name: str, config: dict[str, bool]) -> None:
    bench = Bench(tmp_path, name, **config)
    out = bench.export()
    torch.testing.assert_close(loaded_logprobs(out), bench.logprobs(), atol=1e-5, rtol=0)
    tied = json.loads((out / "config.json").read_text())["tie_word_embeddings"]
    assert tied == (name == "qwen3" and "train_unembed" in config)
    before, after = bench.weights(), safetensors.torch.load_file(out / "model.safetensors")
    norms = [key for key in before if "norm" in key or "embed_tokens" in key]
    assert norms and all(torch.equal(before[key], after[key]) for key in norms)


def test_sums_are_rounded_once_to_the_dtype_of_the_files(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "llama3", dtype=torch.bfloat16)
    before, after = bench.weights(), safetensors.torch.load_file(bench.export() / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    path = "model.layers.1.mlp.up_proj"
    a, b = bench.adapter.modules[path]
    exact = before[f"{path}.weight"].double() + bench.adapter.scale * (b.detach().double() @ a.detach().double())
    error = (after[f"{path}.weight"].double() - exact).abs()
    assert bool((error <= exact.abs() * 2**-8).all())


def test_files_have_the_size_that_was_asked_for_and_progress_is_told(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "llama3")
    out = bench.export(shard_bytes=SMALL_SHARDS)
    index = json.loads((out / INDEX).read_text())
    files = sorted(out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [file.name for file in files] and len(files) > 2
    for file in files:
        tensors = safetensors.torch.load_file(file)
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= SMALL_SHARDS
        assert {index["weight_map"][name] for name in tensors} == {file.name}
    total = index["metadata"]["total_size"]
    assert bench.told[-1] == (total, total) and [done for done, _ in bench.told] == sorted(d for d, _ in bench.told)


def test_rows_come_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "PIECE_BYTES", 300)
    bench = Bench(tmp_path, "gpt-oss")
    torch.testing.assert_close(loaded_logprobs(bench.export()), bench.logprobs(), atol=1e-5, rtol=0)


def test_everything_but_weights_and_the_models_card_is_copied(tmp_path: Path) -> None:
    out = Bench(tmp_path, "llama3").export()
    assert {path.name for path in out.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_a_copy_of_a_tied_embedding_in_the_files_is_not_written_twice(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "qwen3")
    weights = bench.weights()
    bench.store({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    torch.testing.assert_close(loaded_logprobs(bench.export()), bench.logprobs(), atol=1e-5, rtol=0)


def test_files_that_do_not_fit_are_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "qwen3-moe")
    weights = bench.weights()
    some, expert = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.experts.2.up_proj.weight"
    broken: list[tuple[dict[str, Tensor], str]] = [
        ({name: tensor for name, tensor in weights.items() if name != some}, r"do not hold .*q_proj as plain numbers"),
        ({name: tensor for name, tensor in weights.items() if name != expert}, r"do not hold .*experts.gate_up_proj"),
        ({**weights, some: weights[some].to(torch.float8_e4m3fn)}, r"q_proj.weight' quantized, as F8_E4M3"),
        ({**weights, some: weights[some][:-1]}, r"shape \[63, 32\], the adapter is for \[64, 32\]"),
    ]
    for files, message in broken:
        bench.store(files)
        with pytest.raises(CannotMerge, match=message):
            bench.export()
    bench.store(weights)
    path = bench.base_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(BadWeightFiles, match="cut off"):
        bench.export()
    path.unlink()
    with pytest.raises(BadWeightFiles, match="neither"):
        bench.export()
    assert {entry.name for entry in tmp_path.iterdir()} == {"base", "adapter"}


def test_a_folder_that_has_something_in_it_is_not_touched(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "llama3")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(InvalidRequest, match="already"):
        bench.export()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]
