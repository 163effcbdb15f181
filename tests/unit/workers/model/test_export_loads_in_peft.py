"""Adapters as PEFT files: loadable by PEFT as they are, and back."""

import json
import warnings
from pathlib import Path

import peft
import pytest
import safetensors.torch
import torch

from tests.unit.workers.model import model_reference as reference
from workers.model.base import BaseModel
from workers.model.export import CONFIG_FILE, WEIGHTS_FILE, BadAdapterFile, load_peft, peft_files
from workers.model.lora import Routing, routed

CONFIGS = [{}, {"train_unembed": False}, {"train_attn": False, "train_mlp": False}, {"train_mlp": False, "rank": 7}]


def write(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_peft_computes_the_same_logprobs(base: BaseModel, config: dict[str, int], tmp_path: Path) -> None:
    adapter = reference.random_adapter(base, 3, **config)  # type: ignore[arg-type]
    tokens = torch.arange(30).view(2, 15)
    with torch.no_grad(), routed(Routing.of([(adapter, 2)], row_tokens=15)):
        mine = torch.log_softmax(base.lm_head(base.hidden(tokens)), -1)
    folder = write(peft_files(adapter, base.name_or_path, base), tmp_path)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).*adapter keys.*")
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        model = peft.PeftModel.from_pretrained(reference.plain_model(base.name_or_path), folder)
    with torch.no_grad():
        theirs = torch.log_softmax(model(input_ids=tokens).logits, -1)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)
    names = set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))
    assert names == safetensors.torch.load_file(folder / WEIGHTS_FILE).keys()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_round_trip_is_exact_and_bytes_are_stable(base: BaseModel, config: dict[str, int]) -> None:
    adapter = reference.random_adapter(base, 3, **config)  # type: ignore[arg-type]
    files = peft_files(adapter, "some/base", base)
    assert files == peft_files(reference.random_adapter(base, 3, **config), "some/base", base)  # type: ignore[arg-type]
    loaded = load_peft(base, files)
    assert torch.equal(loaded.flat, adapter.flat)
    assert loaded.modules.keys() == adapter.modules.keys()
    assert loaded.scale == adapter.scale
    assert peft_files(loaded, "some/base", base) == files


def test_files_that_peft_wrote_can_be_loaded(base: BaseModel, tmp_path: Path) -> None:
    adapter = reference.random_adapter(base, 3)
    theirs = reference.PeftReference(base.name_or_path, adapter)
    theirs.model.save_pretrained(tmp_path, save_embedding_layers=False)
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert torch.equal(load_peft(base, files).flat, adapter.flat)


def test_misfits_are_refused_by_name(qwen: BaseModel) -> None:
    adapter = reference.random_adapter(qwen, 3)
    files = peft_files(adapter, "b", qwen)
    config, weights = json.loads(files[CONFIG_FILE]), safetensors.torch.load(files[WEIGHTS_FILE])
    some = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"

    def with_config(**change: object) -> dict[str, bytes]:
        return {**files, CONFIG_FILE: json.dumps({**config, **change}).encode()}

    def with_weights(change: dict[str, torch.Tensor], without: str = "") -> dict[str, bytes]:
        kept = {name: tensor for name, tensor in {**weights, **change}.items() if name != without}
        return {**files, WEIGHTS_FILE: safetensors.torch.save(kept)}

    for broken, message in [
        ({WEIGHTS_FILE: files[WEIGHTS_FILE]}, "adapter_config.json is missing"),
        ({CONFIG_FILE: files[CONFIG_FILE]}, "adapter_model.safetensors is missing"),
        ({**files, CONFIG_FILE: b"{"}, "adapter_config.json"),
        ({**files, WEIGHTS_FILE: b"nonsense"}, "adapter_model.safetensors"),
        (with_config(peft_type="LOHA"), "peft_type is 'LOHA'"),
        (with_config(r=5), r"lora_A has shape \(4, 32\), expected \(5, 32\)"),
        (with_config(r="4"), "r must be a positive integer"),
        (with_config(lora_alpha=None), "lora_alpha"),
        (with_config(use_rslora=True), "use_rslora=True is not supported"),
        (with_config(rank_pattern={"q_proj": 2}), "rank_pattern"),
        (with_weights({}, without=some), "lack 'model.layers.0.mlp.up_proj.lora_A'"),
        (with_weights({some: torch.zeros(4, 9)}), r"shape \(4, 9\), expected \(4, 32\)"),
        (with_weights({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)}), "layers.9"),
        (with_weights({"base_model.model.lm_head.weight": torch.zeros(4, 32)}), "not a LoRA weight"),
    ]:
        with pytest.raises(BadAdapterFile, match=message):
            load_peft(qwen, broken)


def test_an_adapter_of_another_model_is_not_exported(qwen: BaseModel) -> None:
    adapter = reference.random_adapter(qwen, 3)
    del adapter.modules["model.layers.1.mlp.up_proj"]
    with pytest.raises(ValueError, match="not one of qwen3-tied"):
        peft_files(adapter, "b", qwen)
