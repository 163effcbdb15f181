"""The frozen base model: a transformers causal language model whose linear layers can carry adapters."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from app.wire.types import LoraConfig, ModelFacts
from workers.model.lora import Adapter, LoraLinear, routed

Group = Literal["attn", "mlp", "unembed"]

GROUPS: dict[str, Group] = {
    "q_proj": "attn",
    "k_proj": "attn",
    "v_proj": "attn",
    "o_proj": "attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
"""The last name of a projection's path → which flag of `LoraConfig` trains it (SEMANTICS §1)."""

LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Configuration keys of models whose logits are more than `lm_head(hidden)`."""


class UnsupportedModel(ValueError):
    """The model at hand cannot be trained or served here; the message names what is in the way."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A linear layer that adapters may train."""

    group: Group
    in_features: int
    out_features: int


class BaseModel:
    """One base model in memory, shared by all adapters and threads. It holds no state between calls.

    `model`: the transformers model, frozen, in eval mode, its targets replaced by `LoraLinear`. `targets`: module path
    → what it is, in the model's order. `lm_head`: the unembedding, whose weight may be the embedding's.
    """

    def __init__(self, model: PreTrainedModel, name_or_path: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.name_or_path = name_or_path
        self.config = model.config
        self.backbone: nn.Module = model.get_decoder()
        check_logits_are_plain(model)
        self.targets = find_targets(model, self.backbone)
        for path in self.targets:
            parent, _, name = path.rpartition(".")
            linear = model.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            setattr(model.get_submodule(parent), name, LoraLinear(linear, path))
        self.lm_head: LoraLinear = model.get_output_embeddings()
        self.device: torch.device = self.lm_head.weight.device
        self.dtype: torch.dtype = self.lm_head.weight.dtype
        self._check_hidden_leads_to_logits()

    @classmethod
    def load(
        cls,
        name_or_path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
    ) -> BaseModel:
        """Load from a folder or the hub. Default: CUDA in bfloat16 if there is one, else the CPU in float32.

        Raises `UnsupportedModel` if some layer of it cannot carry LoRA or its logits are not `lm_head(hidden)`.
        """
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16)
        model = AutoModelForCausalLM.from_pretrained(
            name_or_path, dtype=dtype, revision=revision or "main", attn_implementation="sdpa"
        )
        nn.Module.to(model, device=device)
        return cls(model, os.fspath(name_or_path))

    def new_adapter(self, config: LoraConfig) -> Adapter:
        """A fresh adapter on this model's device. Raises ValueError if the configuration trains nothing, or the rank is
        < 1.
        """
        if config.rank < 1:
            raise ValueError(f"rank must be at least 1, got {config.rank}")
        wanted = {"attn": config.train_attn, "mlp": config.train_mlp, "unembed": config.train_unembed}
        shapes = {path: (t.out_features, t.in_features) for path, t in self.targets.items() if wanted[t.group]}
        if not shapes:
            raise ValueError("at least one of train_attn, train_mlp and train_unembed must be true")
        return Adapter(config, shapes, self.device)

    def hidden(self, input_ids: Tensor) -> Tensor:
        """`input_ids` [B, L], padded on the right → the input of `lm_head` [B, L, D], under the routing in force.

        No mask is built: attention is causal, so a real token never sees the padding after it.
        """
        hidden_BLD: Tensor = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden_BLD

    @cached_property
    def facts(self) -> ModelFacts:
        """What the API needs to know of this model."""
        config = self.config
        return ModelFacts(
            architecture=type(self.model).__name__,
            vocab_size=self.lm_head.out_features,
            context_length=int(config.max_position_embeddings),
            config_hash=config_hash(config.to_dict()),
            hidden_size=self.lm_head.in_features,
            extra={
                "dtype": str(self.dtype).removeprefix("torch."),
                "tied_unembedding": str(self.tied).lower(),
                "transformers": transformers.__version__,
            },
        )

    @property
    def tied(self) -> bool:
        """Whether the unembedding's weight is the embedding's."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.data_ptr() == self.lm_head.weight.data_ptr()

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a sequence, from the generation config, else the config, else the tokenizer."""
        for source in (self.model.generation_config, self.config):
            ids = getattr(source, "eos_token_id", None)
            if ids is not None:
                return tuple(sorted(set(ids))) if isinstance(ids, (list, tuple)) else (int(ids),)
        eos = self.tokenizer().eos_token_id
        return () if eos is None else (int(eos),)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer, loaded when first asked for."""
        return self._tokenizer

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.name_or_path)
        return tokenizer

    @torch.no_grad()
    def _check_hidden_leads_to_logits(self) -> None:
        tokens = torch.arange(4, device=self.device).view(1, 4) % self.lm_head.out_features
        with routed(None):
            expected = self.model(input_ids=tokens, use_cache=False).logits.float()
            logits = self.lm_head(self.hidden(tokens)).float()
        if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-4):
            raise UnsupportedModel(f"{type(self.model).__name__}: its logits are not lm_head(hidden)")


def check_logits_are_plain(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModel` if the configuration scales or caps the logits after the unembedding."""
    for key in LOGIT_TRANSFORMS:
        if getattr(model.config, key, None) not in (None, 1, 1.0):
            raise UnsupportedModel(f"{type(model).__name__}: `{key}` changes the logits after the unembedding")


def find_targets(model: PreTrainedModel, backbone: nn.Module) -> dict[str, TargetSpec]:
    """All layers that adapters may train. Raises `UnsupportedModel` if the model has a matrix that is neither a target,
    nor an embedding, nor a router: training "all layers" must not leave one out in silence.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    targets: dict[str, TargetSpec] = {}
    for module in backbone.modules():
        path = paths[id(module)]
        if isinstance(module, nn.Embedding):
            continue
        if type(module) is nn.Linear and path.rpartition(".")[2] in GROUPS:
            group = GROUPS[path.rpartition(".")[2]]
            targets[path] = TargetSpec(group, module.in_features, module.out_features)
        elif any(parameter.dim() > 1 for parameter in module.parameters(recurse=False)):
            raise UnsupportedModel(f"{path} ({type(module).__name__}) cannot carry LoRA")
    if missing := {"attn", "mlp"} - {target.group for target in targets.values()}:
        raise UnsupportedModel(f"{type(model).__name__} has no {' and no '.join(sorted(missing))} layers known here")
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UnsupportedModel(
            f"the unembedding of {type(model).__name__} is {type(head).__name__}, not a linear layer"
        )
    targets[paths[id(head)]] = TargetSpec("unembed", head.in_features, head.out_features)
    return targets


def config_hash(config: dict[str, Any]) -> str:
    """SHA-256 (hex) of a model configuration without what does not change the function that it computes."""
    ignored = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    kept = {key: value for key, value in config.items() if key not in ignored}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
