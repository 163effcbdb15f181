"""Adapters of every family as PEFT files: loadable by PEFT as they are, and back."""

from __future__ import annotations

import warnings
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch

from tests.unit.workers.model import model_reference as reference
from tests.unit.workers.model.families import FAMILIES, PeftOf, plain
from tests.unit.workers.model.test_export_loads_in_peft import write
from workers.model.base import BaseModel
from workers.model.export import WEIGHTS_FILE, BadAdapterFile, load_peft, peft_files
from workers.model.lora import Routing, routed

CONFIGS = [{}, {"train_attn": False, "train_unembed": False}, {"train_mlp": False, "rank": 7}]

pytestmark = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> BaseModel:
    return BaseModel(plain(request.param), request.param)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_peft_computes_the_same_logprobs(family: BaseModel, config: dict[str, int], tmp_path: Path) -> None:
    adapter = reference.random_adapter(family, 3, **config)  # type: ignore[arg-type]
    adapter.flat.mul_(0.5)
    tokens = torch.arange(30).view(2, 15)
    with torch.no_grad(), routed(Routing.of([(adapter, 2)], row_tokens=15)):
        mine = torch.log_softmax(family.lm_head(family.hidden(tokens)), -1)
    folder = write(peft_files(adapter, family.name_or_path, family), tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).*adapter keys.*")
        warnings.filterwarnings("error", message=".*were set but no .* was matched.*")
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        model = peft.PeftModel.from_pretrained(plain(family.name_or_path), folder)
    with torch.no_grad():
        theirs = torch.log_softmax(model(input_ids=tokens, use_cache=False).logits, -1)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    names = set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    assert names == safetensors.torch.load_file(folder / WEIGHTS_FILE).keys()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_round_trip_is_exact(family: BaseModel, config: dict[str, int]) -> None:
    adapter = reference.random_adapter(family, 3, **config)  # type: ignore[arg-type]
    loaded = load_peft(family, peft_files(adapter, "some/base", family))
    assert torch.equal(loaded.flat, adapter.flat)
    assert loaded.modules.keys() == adapter.modules.keys()


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_files_that_peft_wrote_can_be_loaded(name: str, tmp_path: Path) -> None:
    base = BaseModel(plain(name), name)
    adapter = reference.random_adapter(base, 3)
    PeftOf(name, adapter).model.save_pretrained(tmp_path, save_embedding_layers=False)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert torch.equal(load_peft(base, files).flat, adapter.flat)


def test_weights_of_another_number_of_experts_are_refused_by_name() -> None:
    base = BaseModel(plain("qwen3-moe"), "qwen3-moe")
    files = peft_files(reference.random_adapter(base, 3), "b", base)
    weights = safetensors.torch.load(files[WEIGHTS_FILE])
    some = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    for broken in (weights[some][:-1], weights[some].unsqueeze(0)):
        changed = {**files, WEIGHTS_FILE: safetensors.torch.save({**weights, some: broken.contiguous()})}
        with pytest.raises(BadAdapterFile, match=r"layers\.0\.mlp\.experts\.base_layer\.lora_A.* 6 experts"):
            load_peft(base, changed)
