"""Adapters that PEFT has saved become ours: they compute what PEFT computes, and every layer can be trained on."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.unit.workers.model.families import plain
from workers.model.base import BaseModel
from workers.model.export import BadAdapterFile
from workers.model.foreign import Converted, convert
from workers.model.lora import Routing, routed

TOKENS = torch.arange(30).view(2, 15)
ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

pytestmark = pytest.mark.filterwarnings("ignore")


class Theirs:
    """A model wrapped by PEFT, all factors random, and what `save_pretrained` writes of it."""

    def __init__(self, folder: Path, name: str = "llama3", **options: Any) -> None:
        config = peft.LoraConfig(**{"r": 4, "lora_alpha": 9, "task_type": "CAUSAL_LM", **options})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            self.model = peft.get_peft_model(plain(name), config)
            for parameter_name, parameter in self.model.named_parameters():
                if "lora_" in parameter_name:
                    parameter.data.normal_(std=0.1)
        self.name = name
        self.model.save_pretrained(folder)
        self.config = json.loads((folder / "adapter_config.json").read_text())
        self.weights = load_file(folder / "adapter_model.safetensors")

    def logprobs(self) -> Tensor:
        with torch.no_grad():
            return torch.log_softmax(self.model.eval()(input_ids=TOKENS, use_cache=False).logits, -1)

    def convert(self, *, max_rank: int = 64, **config: Any) -> tuple[BaseModel, Converted]:
        base = BaseModel(plain(self.name), self.name)
        base_weights = plain(self.name).state_dict()

        def is_base(name: str, tensor: Tensor) -> bool:
            return name in base_weights and torch.equal(base_weights[name], tensor)

        changed = {**self.config, **config}
        return base, convert(base, changed, self.weights, max_rank=max_rank, is_base=is_base)


OPTIONS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
    "everything": {"target_modules": "all-linear"},
    "the unembedding": {"target_modules": ["q_proj", "lm_head"]},
    "two of four": {"target_modules": ATTENTION},
    "one layer": {"target_modules": ATTENTION, "layers_to_transform": [1]},
    "its own alpha": {"target_modules": ATTENTION, "lora_alpha": 16, "r": 16},
    "rank-stabilized": {"target_modules": ATTENTION, "use_rslora": True},
    "ranks by pattern": {"target_modules": ATTENTION, "rank_pattern": {"layers.0.self_attn.q_proj": 2, "v_proj": 7}},
    "alphas by pattern": {"target_modules": ATTENTION, "alpha_pattern": {"v_proj": 3}},
    "both, rank-stabilized": {
        "target_modules": ATTENTION,
        "rank_pattern": {"v_proj": 7},
        "alpha_pattern": {"q_proj": 2},
        "use_rslora": True,
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_what_peft_saved_computes_the_same_here(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_same(Theirs(tmp_path, **options))


def test_experts_of_both_stacks_compute_the_same_here(tmp_path: Path) -> None:
    theirs = Theirs(tmp_path, "qwen3-moe", target_modules=ATTENTION, target_parameters=EXPERTS)
    converted = assert_same(theirs)
    assert {path.rpartition(".")[2] for path in converted.fresh} == {"k_proj", "o_proj"}


def test_a_tied_unembedding_computes_the_same_here(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = Theirs(tmp_path, "qwen3", target_modules=["lm_head", "q_proj"])
    embedding = theirs.weights.pop("base_model.model.lm_head.base_layer.weight")
    assert torch.equal(embedding, plain("qwen3").get_input_embeddings().weight)
    assert_same(theirs)


def assert_same(theirs: Theirs) -> Converted:
    base, converted = theirs.convert()
    adapter = converted.adapter
    with torch.no_grad(), routed(Routing.of([(adapter, 2)], row_tokens=15)):
        mine = torch.log_softmax(base.lm_head(base.hidden(TOKENS)), -1)
    torch.testing.assert_close(mine, theirs.logprobs(), atol=1e-5, rtol=0)
    return converted


def test_weights_of_one_rank_and_scale_are_taken_bit_for_bit(tmp_path: Path) -> None:
    theirs = Theirs(tmp_path, target_modules=ATTENTION)
    _, converted = theirs.convert()
    adapter = converted.adapter
    assert (adapter.config.rank, adapter.config.alpha) == (4, 9.0)
    a, b = adapter.modules["model.layers.1.self_attn.v_proj"]
    prefix = "base_model.model.model.layers.1.self_attn.v_proj"
    assert torch.equal(a, theirs.weights[f"{prefix}.lora_A.weight"])
    assert torch.equal(b, theirs.weights[f"{prefix}.lora_B.weight"])


def test_what_is_filled_in_can_be_trained(tmp_path: Path) -> None:
    """Rows of A are as a fresh adapter has them wherever B is zero: else no gradient would ever come through."""
    theirs = Theirs(tmp_path, target_modules=ATTENTION, rank_pattern={"q_proj": 2})
    _, converted = theirs.convert()
    assert {path.rpartition(".")[2] for path in converted.fresh} == {"k_proj", "o_proj"}
    for path, (a, b) in converted.adapter.modules.items():
        assert bool(a.detach().abs().sum(1).all()), path
        filled = b.detach()[:, 2:] if "q_proj" in path else b.detach()
        assert bool(filled.any()) == ("v_proj" in path), path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shorter_floats_are_taken_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    theirs = Theirs(tmp_path, target_modules=ATTENTION)
    theirs.weights = {name: tensor.to(dtype) for name, tensor in theirs.weights.items()}
    _, converted = theirs.convert()
    a, _ = converted.adapter.modules["model.layers.0.self_attn.q_proj"]
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    assert a.dtype == torch.float32 and torch.equal(a, theirs.weights[name].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"an_option_of_a_later_peft": 1}, "an_option_of_a_later_peft"),
        ({"init_lora_weights": "pissa"}, "changes the base model"),
        ({"task_type": "SEQ_CLS"}, "task_type"),
        ({"r": 5}, r"lora_A has shape \(4, 32\), expected \(5, 32\)"),
        ({"rank_pattern": {"v_proj": 3}}, r"v_proj.lora_A has shape \(4, 32\), expected \(3, 32\)"),
        ({"rank_pattern": {"(": 3}}, "rank_pattern"),
        ({"lora_alpha": 0}, "lora_alpha must be a positive number"),
        ({"alpha_pattern": {"q_proj": -1}}, "q_proj has rank 4 and alpha -1"),
    ],
    ids=str,
)
def test_what_has_no_form_here_is_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadAdapterFile, match=message):
        Theirs(tmp_path, target_modules=ATTENTION).convert(**change)


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (f"{Q}.lora_B.weight", None, "q_proj has no lora_B"),
        (f"{Q}.lora_A.weight", torch.zeros(4, 32, dtype=torch.int8), "has dtype torch.int8"),
        (f"{Q}.lora_A.weight", torch.full((4, 32), torch.nan), "not finite"),
        (f"{Q}.lora_A.weight", torch.zeros(4, 31), r"shape \(4, 31\)"),
        ("base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight", torch.zeros(4, 32), "layers.9"),
        ("base_model.model.lm_head.weight", torch.zeros(97, 32), "'base_model.model.lm_head.weight' is not a LoRA"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 97), "lora_embedding_A"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_weights_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, name: str, tensor: Tensor | None, message: str
) -> None:
    theirs = Theirs(tmp_path, target_modules=ATTENTION)
    theirs.weights.pop(name, None)
    if tensor is not None:
        theirs.weights[name] = tensor
    with pytest.raises(BadAdapterFile, match=message):
        theirs.convert()


def test_a_rank_above_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadAdapterFile, match="r=4 is above the limit of 3"):
        Theirs(tmp_path, target_modules=ATTENTION).convert(max_rank=3)


def test_a_file_without_weights_is_refused(tmp_path: Path) -> None:
    theirs = Theirs(tmp_path, target_modules=ATTENTION)
    theirs.weights = {}
    with pytest.raises(BadAdapterFile, match="holds no weights"):
        theirs.convert()
