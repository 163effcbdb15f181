"""Tiny random models of the families that we claim to train, and what PEFT makes of an adapter on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import peft
import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from app.wire.types import Datum
from workers.model.lora import Adapter

VOCAB = 97
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DENSE = {**SIZES, "intermediate_size": 48, "head_dim": 16}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
SHARED = {"shared_expert_intermediate_size": 40}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}


def _qwen3_moe() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**DENSE, **EXPERTS, norm_topk_prob=True))


def _qwen3_moe_with_a_dense_layer() -> PreTrainedModel:
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**DENSE, **EXPERTS, mlp_only_layers=[0]))


def _deepseek_v3() -> PreTrainedModel:
    config = DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        intermediate_size=48,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    return DeepseekV3ForCausalLM(config)


def _gpt_oss() -> PreTrainedModel:
    config = GptOssConfig(
        **SIZES, **WINDOWS, head_dim=16, intermediate_size=24, num_local_experts=6, num_experts_per_tok=2
    )
    return GptOssForCausalLM(config)


def _gemma3_that_sees() -> PreTrainedModel:
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={**DENSE, **WINDOWS},
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        eos_token_id=None,
    )
    return Gemma3ForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**DENSE, tie_word_embeddings=True)),
    "llama3": lambda: LlamaForCausalLM(LlamaConfig(**DENSE, tie_word_embeddings=False)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**DENSE, **WINDOWS)),
    "gemma3-that-sees": _gemma3_that_sees,
    "qwen3-moe": _qwen3_moe,
    "qwen3-moe-dense-layer": _qwen3_moe_with_a_dense_layer,
    "deepseek-v3": _deepseek_v3,
    "gpt-oss": _gpt_oss,
    "qwen3.5": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**DENSE, **DELTA_NET)),
    "qwen3.5-moe": lambda: Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SIZES, **EXPERTS, **DELTA_NET, **SHARED)),
    "qwen3-next": lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**DENSE, **EXPERTS, **DELTA_NET, **SHARED)),
}


def plain(name: str) -> PreTrainedModel:
    """The same random model for the same name; nothing in it is zero, not even biases.

    Delta nets forget slowly: they take differences of sums of decays, in float32 whatever the model's dtype, and large
    decays would leave less than five digits of them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = FAMILIES[name]()
        for path, parameter in model.named_parameters():
            if path.endswith("A_log"):
                parameter.data.fill_(-2.0)
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


class PeftOf:
    """The model `name` wrapped by PEFT as its users would, with the weights of `adapter`."""

    def __init__(self, name: str, adapter: Adapter) -> None:
        model = plain(name)
        modules = dict(model.named_modules())
        self.model = peft.get_peft_model(
            model,
            peft.LoraConfig(
                r=adapter.config.rank,
                lora_alpha=32,
                target_modules=[path for path in adapter.modules if _is_attention_or_head(path)],
                target_parameters=[
                    f"{path}.weight" if path in modules else path
                    for path in adapter.modules
                    if not _is_attention_or_head(path)
                ],
            ),
        )
        self.parameters: dict[str, Tensor] = {}
        for path, (a, b) in adapter.modules.items():
            layer = self._layer(path)
            for suffix, mine in (("lora_A", a), ("lora_B", b)):
                theirs = getattr(layer, suffix)["default"].weight
                theirs.data.copy_(as_peft(suffix, mine.data))
                self.parameters[f"{path}.{suffix}"] = theirs

    def _layer(self, path: str) -> torch.nn.Module:
        """PEFT's layer around a projection or a stack of experts: wrappers of one module lie within each other."""
        inner = self.model.base_model.model
        if path.endswith("experts.down_proj") and "shared" not in path:
            return inner.get_submodule(path.removesuffix(".down_proj"))
        if path.endswith("experts.gate_up_proj"):
            return inner.get_submodule(path.removesuffix(".gate_up_proj")).base_layer
        return inner.get_submodule(path)

    def logprobs(self, datum: Datum) -> Tensor:
        """log p(target) [N]."""
        tokens = torch.from_numpy(np.asarray(datum.tokens)).long().unsqueeze(0)
        logits = self.model(input_ids=tokens, use_cache=False).logits[0]
        targets = torch.from_numpy(datum.inputs["target_tokens"])
        return torch.log_softmax(logits.float(), -1).gather(1, targets.unsqueeze(1)).squeeze(1)

    def grads(self) -> dict[str, Tensor]:
        """By the names of `Adapter.state`, in PEFT's shapes."""
        return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in self.parameters.items()}


def _is_attention_or_head(path: str) -> bool:
    return "attn" in path or path == "lm_head"


def as_peft(suffix: str, tensor: Tensor) -> Tensor:
    """An adapter's [E, R, I] or [E, O, R] as PEFT stores it: experts × rank flat, by expert in A and by rank in B."""
    if tensor.dim() == 2:
        return tensor
    if suffix == "lora_A":
        return tensor.reshape(-1, tensor.shape[2])
    return tensor.permute(1, 2, 0).reshape(tensor.shape[1], -1)
