"""vLLM serves adapters of experts, as the trainer writes them, with the logprobs of transformers and PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from app.wire.types import LoraConfig
from tests.engine_suite.models import CONTEXT, VOCAB, make_tokenizer, prompt
from tests.engine_suite.rig import Asked, Rig, ask
from tests.vllm.engines import start
from workers.model.base import BaseModel
from workers.model.export import write_peft

ADAPTERS = {
    "everything": LoraConfig(rank=4, train_unembed=True, seed=1),
    "experts": LoraConfig(rank=2, train_attn=False, train_unembed=False, seed=2),
    "attention": LoraConfig(rank=8, train_mlp=False, train_unembed=False, seed=3),
}
EOS = 3
WHO = (None, *ADAPTERS)


def make_mixture(folder: Path) -> Qwen3MoeForCausalLM:
    """A random Qwen3-MoE: a dense layer, then two of six experts, of which each token takes two."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        mlp_only_layers=[0],
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    make_tokenizer(EOS).save_pretrained(folder)
    return model


def make_adapters(model: PreTrainedModel, folder: Path) -> dict[str, Path]:
    """Adapters with random B, large enough to change what is sampled, as the trainer saves them."""
    base = BaseModel.load(folder / "model", dtype=torch.float32, device="cpu")
    paths = {}
    for name, config in ADAPTERS.items():
        adapter = base.new_adapter(config)
        generator = torch.Generator().manual_seed(config.seed)
        for _, b in adapter.modules.values():
            b.data.normal_(0, 0.1, generator=generator)
        paths[name] = folder / name
        paths[name].mkdir()
        write_peft(adapter, "tiny", base, paths[name])
    return paths


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        folder = tmp_path_factory.mktemp("mixture")
        made = Rig(start, folder, make_model=make_mixture, make_adapters=make_adapters)
    yield made
    made.close()


@pytest.mark.parametrize("who", WHO, ids=str)
def test_samples_have_the_logprobs_of_transformers_and_peft(rig: Rig, who: str | None) -> None:
    request = ask("alone", prompt(20), max_tokens=12, temperature=0.0, stop_tokens=())
    rig.check(Asked(request, who), rig.sample(request, who))


def test_adapters_and_the_base_model_share_a_batch(rig: Rig) -> None:
    asked = [
        Asked(ask(f"{i}", prompt(5 + 7 * i, i), max_tokens=6 + i, temperature=i % 2, stop_tokens=()), WHO[i % len(WHO)])
        for i in range(12)
    ]
    results = rig.serve(asked)
    for each in asked:
        rig.check(each, results[each.request.request_id])


def test_an_adapter_of_experts_changes_what_is_sampled(rig: Rig) -> None:
    request = ask("same", prompt(20), max_tokens=12, temperature=0.0, stop_tokens=())
    assert rig.tokens(request, "experts") != rig.tokens(request)
