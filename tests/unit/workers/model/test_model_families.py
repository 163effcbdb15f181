"""Every family of models trains like plain transformers + PEFT on the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from app.wire.types import ForwardBackwardOutput, LoraConfig
from tests.unit.workers.model import model_reference as reference
from tests.unit.workers.model.families import FAMILIES, PeftOf, as_peft, plain
from workers.model.base import BaseModel, UnsupportedModel
from workers.model.forward import Work, run_pass
from workers.model.lora import Adapter, Routing, routed

MIXTURE = [
    {"rank": 1},
    {"rank": 64},
    {"rank": 8, "train_mlp": False, "train_unembed": False},
    {"rank": 3, "train_attn": False, "train_mlp": False},
    {"rank": 5, "train_attn": False, "train_unembed": False},
]
"""Everything, attention alone, the unembedding alone, the MLP alone."""

pytestmark = pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> BaseModel:
    return BaseModel(plain(request.param), request.param)


def small_adapter(base: BaseModel, seed: int, **config: bool | int) -> Adapter:
    """An adapter that moves the weights by a tenth of their size, whatever its rank: a model of this size that it moved
    further would make of float32's rounding more than 1e-5."""
    adapter = reference.random_adapter(base, seed, **config)  # type: ignore[arg-type]
    for _, b in adapter.modules.values():
        b.data.mul_(0.2 / adapter.config.rank**0.5)
    return adapter


def works_of(base: BaseModel) -> list[Work]:
    works = []
    for i, config in enumerate(MIXTURE):
        lengths = np.random.default_rng(i).integers(1, 24, 3).tolist()
        if i == 0:
            lengths.append(70)
        adapter = small_adapter(base, i, **config)
        works.append(Work(adapter, reference.random_data(i, lengths), "cross_entropy"))
    return works


def run(base: BaseModel, works: list[Work]) -> list[ForwardBackwardOutput]:
    outputs = run_pass(base, works, micro_batch_tokens=256)
    assert all(isinstance(output, ForwardBackwardOutput) for output in outputs), outputs
    return outputs  # type: ignore[return-value]


def test_a_mixed_batch_gives_each_adapter_what_peft_gives_it(family: BaseModel) -> None:
    works = works_of(family)
    for work, output in zip(works, run(family, works), strict=True):
        theirs = PeftOf(family.name_or_path, work.adapter)
        for datum, mine in zip(work.data, output.loss_fn_outputs, strict=True):
            logprobs = theirs.logprobs(datum)
            np.testing.assert_allclose(mine["logprobs"], logprobs.detach().numpy(), atol=1e-5, rtol=0)
            (-logprobs * torch.from_numpy(datum.inputs["weights"])).sum().backward()
        mine = {name: as_peft(name[-6:], grad) for name, grad in reference.grads_of(work.adapter).items()}
        reference.assert_close(mine, theirs.grads(), 1e-5)
        assert min(float(grad.abs().max()) for grad in theirs.grads().values()) > 1e-3


def test_an_adapter_alone_gets_what_it_gets_in_a_mixed_batch(family: BaseModel) -> None:
    together, alone = works_of(family), works_of(family)
    for mixed, single, output in zip(together, alone, run(family, together), strict=True):
        (expected,) = run(family, [single])
        for a, b in zip(output.loss_fn_outputs, expected.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(a["logprobs"], b["logprobs"], atol=1e-5, rtol=0)
        reference.assert_close(reference.grads_of(mixed.adapter), reference.grads_of(single.adapter), 1e-5)


def test_a_fresh_adapter_is_the_base_bit_for_bit(family: BaseModel) -> None:
    tokens = torch.arange(60).view(3, 20)
    with torch.no_grad():
        expected = plain(family.name_or_path)(input_ids=tokens, use_cache=False).logits
    fresh = [family.new_adapter(LoraConfig(rank=rank, seed=rank)) for rank in (4, 2)]
    with torch.no_grad(), routed(Routing.of([(fresh[0], 1), (None, 1), (fresh[1], 1)], row_tokens=20)):
        assert torch.equal(family.lm_head(family.hidden(tokens)), expected)
    with torch.no_grad():
        assert torch.equal(family.lm_head(family.hidden(tokens)), expected)


def test_a_saved_model_loads_with_what_attention_it_has(family: BaseModel, tmp_path: Path) -> None:
    plain(family.name_or_path).save_pretrained(tmp_path)
    loaded = BaseModel.load(tmp_path, device="cpu")
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(loaded.lm_head(loaded.hidden(tokens)), family.lm_head(family.hidden(tokens)))
    assert loaded.targets == family.targets
    assert loaded.facts.context_length == 128


def test_every_projection_carries_an_adapter(family: BaseModel) -> None:
    matrices = {
        name.removesuffix(".weight")
        for name, parameter in plain(family.name_or_path).named_parameters()
        if parameter.dim() > 1 and not name.endswith(("_bias", "conv1d.weight")) and "vision" not in name
    }
    frozen = {name for name in matrices if name.rpartition(".")[2] in ("embed_tokens", "gate", "router")}
    frozen |= {name for name in matrices if name.endswith(("shared_expert_gate", "mm_input_projection_weight"))}
    assert family.targets.keys() - {"lm_head"} == matrices - frozen - {"lm_head"}


def test_a_layer_that_should_carry_lora_and_cannot_is_an_error_at_load() -> None:
    def without_gates(model: PreTrainedModel) -> None:
        model.model.layers[1].mlp.experts.has_gate = False

    def with_another_projection(model: PreTrainedModel) -> None:
        model.model.layers[0].self_attn.r_proj = nn.Linear(32, 32)

    def with_a_matrix(model: PreTrainedModel) -> None:
        model.model.layers[0].mlp.mixing = nn.Parameter(torch.zeros(32, 32))

    for change, message in [
        (without_gates, r"model\.layers\.1\.mlp\.experts \(Qwen3MoeExperts\) cannot carry LoRA"),
        (with_another_projection, r"model\.layers\.0\.self_attn\.r_proj \(Linear\) cannot carry LoRA"),
        (with_a_matrix, r"model\.layers\.0\.mlp \(Qwen3MoeSparseMoeBlock\) cannot carry LoRA"),
    ]:
        model = plain("qwen3-moe")
        change(model)
        with pytest.raises(UnsupportedModel, match=message):
            BaseModel(model, "changed")


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_experts_that_no_token_reaches_have_gradient_zero(name: str) -> None:
    base = BaseModel(plain(name), name)
    adapter = reference.random_adapter(base, 1)
    reference.run_one(base, Work(adapter, reference.random_data(1, [1]), "cross_entropy"))
    stacks = {path: base.targets[path].experts for path in adapter.modules if base.targets[path].experts}
    assert stacks
    for path in stacks:
        for parameter in adapter.modules[path]:
            assert parameter.grad is not None
            reached = [bool(grad.any()) for grad in parameter.grad]
            assert 0 < sum(reached) == base.config.num_experts_per_tok


def test_experts_of_one_stack_start_with_different_weights() -> None:
    base = BaseModel(plain("qwen3-moe"), "qwen3-moe")
    a, b = base.new_adapter(LoraConfig(rank=2, seed=0)).modules["model.layers.1.mlp.experts.down_proj"]
    assert a.shape == (6, 2, 24) and b.shape == (6, 32, 2)
    assert not torch.equal(a[0], a[1]) and not b.any()
    assert float(a.detach().abs().max()) <= 24**-0.5
