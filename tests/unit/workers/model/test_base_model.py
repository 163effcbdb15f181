"""Loading a base model: what can carry adapters, and what is refused by name."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from app.wire.types import LoraConfig
from tests.unit.workers.model import model_reference as reference
from workers.model.base import BaseModel, UnsupportedModel, config_hash
from workers.model.tiny import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(out)
    return out


def test_targets_and_facts(base: BaseModel) -> None:
    assert len(base.targets) == 2 * 7 + 1
    assert base.targets["lm_head"].group == "unembed"
    assert base.targets["model.layers.1.self_attn.k_proj"].group == "attn"
    down = base.targets["model.layers.0.mlp.down_proj"]
    assert (down.group, down.in_features, down.out_features) == ("mlp", 48, 32)
    assert base.facts.vocab_size == reference.VOCAB
    assert base.facts.context_length == 128
    assert base.tied == (base.name_or_path == "qwen3-tied")


def test_each_flag_trains_its_group(base: BaseModel) -> None:
    off = {"train_attn": False, "train_mlp": False, "train_unembed": False}
    for flag, group in (("train_attn", "attn"), ("train_mlp", "mlp"), ("train_unembed", "unembed")):
        adapter = base.new_adapter(LoraConfig(rank=2, seed=0, **{**off, flag: True}))
        assert adapter.modules.keys() == {path for path, target in base.targets.items() if target.group == group}
    with pytest.raises(ValueError, match="at least one of train_attn, train_mlp and train_unembed"):
        base.new_adapter(LoraConfig(rank=2, seed=0, **off))
    with pytest.raises(ValueError, match="rank"):
        base.new_adapter(LoraConfig(rank=0, seed=0))


def test_hidden_builds_no_mask_and_gives_the_models_logits(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(0, reference.VOCAB, (3, 20))
    with torch.no_grad():
        expected = reference.plain_model(base.name_or_path)(input_ids=tokens).logits
    masks = []
    attend = nn.functional.scaled_dot_product_attention

    def watched(*arguments: object, **options: object) -> torch.Tensor:
        masks.append((options["attn_mask"], options["is_causal"]))
        return attend(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    with torch.no_grad():
        assert torch.equal(base.lm_head(base.hidden(tokens)), expected)
    assert masks == [(None, True)] * 2


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


def test_models_that_cannot_carry_lora_are_refused_by_name() -> None:
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=32))
    with pytest.raises(UnsupportedModel, match=r"transformer\.h\.0\.attn\.c_attn \(Conv1D\)"):
        BaseModel(gpt2, "gpt2")
    gemma = Gemma2ForCausalLM(Gemma2Config(**SMALL, intermediate_size=32, head_dim=16, final_logit_softcapping=30.0))
    with pytest.raises(UnsupportedModel, match="final_logit_softcapping"):
        BaseModel(gemma, "gemma")


def test_hidden_that_does_not_lead_to_the_logits_is_refused() -> None:
    model = reference.plain_model("llama-untied")
    forward = model.forward

    def scaled(*arguments: object, **options: object) -> object:
        output = forward(*arguments, **options)
        output.logits = output.logits * 0.5
        return output

    model.forward = scaled  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match="not lm_head"):
        BaseModel(model, "scaled")


def test_the_configurations_hash_ignores_where_it_came_from() -> None:
    config = {"hidden_size": 8, "vocab_size": 9}
    assert config_hash(config) == config_hash({**config, "_name_or_path": "x", "transformers_version": "6"})
    assert config_hash(config) != config_hash({**config, "vocab_size": 10})


def test_the_tiny_model_loads_and_speaks_chatml(tiny: Path) -> None:
    base = BaseModel.load(tiny, device="cpu")
    tokenizer = base.tokenizer()
    assert base.dtype == torch.float32
    assert (base.facts.vocab_size, base.facts.context_length, base.tied) == (2048, 2048, True)
    assert len(tokenizer) == 2048
    assert set(base.eos_token_ids) == set(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    chat = [{"role": "user", "content": "What is 12 + 7? \n é 漢字 🎉"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == f"<|im_start|>user\n{chat[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.decode(ids, skip_special_tokens=True).startswith("user")


def test_the_tiny_model_is_the_same_every_time(tiny: Path, tmp_path: Path) -> None:
    again = tmp_path / "deep" / "again"
    make_tiny_model(again)
    files = sorted(path.name for path in tiny.iterdir())
    assert files == sorted(path.name for path in again.iterdir())
    assert all((tiny / name).read_bytes() == (again / name).read_bytes() for name in files)
    assert [path.name for path in again.parent.iterdir()] == ["again"]
