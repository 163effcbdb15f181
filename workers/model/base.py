"""The frozen base model: a transformers causal language model whose linear layers can carry adapters."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from app.wire.types import LoraConfig, ModelFacts
from workers.model import attention
from workers.model.attention import Packing
from workers.model.lora import Adapter, LoraLinear, routed
from workers.model.targets import TargetSpec, UnsupportedModel, install

__all__ = ["BaseModel", "TargetSpec", "UnsupportedModel", "config_hash"]

LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Configuration keys of models whose logits are more than `lm_head(hidden)`."""


class BaseModel:
    """One base model in memory, shared by all adapters and threads. It holds no state between calls.

    `model`: the transformers model, frozen, in eval mode, its targets replaced by layers that carry LoRA. Of a model
    that sees or hears, the text part alone is used: `backbone` is its decoder, `config` that part's. `targets`: path →
    what it is, in the model's order (see `install`). `lm_head`: the unembedding, whose weight may be the embedding's.
    With `weights_come_later` the caller calls `check_hidden_leads_to_logits` when they are there.
    """

    def __init__(self, model: PreTrainedModel, name_or_path: str, *, weights_come_later: bool = False) -> None:
        self.model = model.eval().requires_grad_(False)
        self.name_or_path = name_or_path
        self.config = model.config.get_text_config(decoder=True)
        self.backbone: PreTrainedModel = model.get_decoder()
        check_logits_are_plain(type(model).__name__, self.config)
        self.targets = install(model, self.backbone)
        self.lm_head: LoraLinear = model.get_output_embeddings()
        self.device: torch.device = self.lm_head.weight.device
        self.dtype: torch.dtype = self.lm_head.weight.dtype
        self.attention: attention.Kind = "padded"
        """How passes attend; see `attend`."""
        self._root: nn.Module | None = None
        if not weights_come_later:
            self.check_hidden_leads_to_logits()

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
        model = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype, revision=revision or "main")
        nn.Module.to(model, device=device)
        return cls(model, os.fspath(name_or_path))

    @classmethod
    def outline(
        cls, name_or_path: str | os.PathLike[str], *, dtype: torch.dtype, revision: str | None = None
    ) -> BaseModel:
        """The same model without its weights: it tells all that the configuration and the tokenizer tell, and which
        adapters fit, and takes no memory. `dtype` is what its weights would have.

        Raises `UnsupportedModel` as `load` does, but for what only the weights show.
        """
        config = AutoConfig.from_pretrained(name_or_path, revision=revision or "main")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        with suppress(OSError):  # there is none
            model.generation_config = GenerationConfig.from_pretrained(name_or_path, revision=revision or "main")
        return cls(model, os.fspath(name_or_path), weights_come_later=True)

    def new_adapter(self, config: LoraConfig) -> Adapter:
        """A fresh adapter on this model's device. Raises ValueError if the configuration trains nothing, or the rank is
        < 1.
        """
        if config.rank < 1:
            raise ValueError(f"rank must be at least 1, got {config.rank}")
        wanted = {"attn": config.train_attn, "mlp": config.train_mlp, "unembed": config.train_unembed}
        shapes = {path: target.shape for path, target in self.targets.items() if wanted[target.group]}
        if not shapes:
            raise ValueError("at least one of train_attn, train_mlp and train_unembed must be true")
        return Adapter(config, shapes, self.device)

    def attend(self, kind: attention.Kind) -> None:
        """Let passes pad their sequences, or pack them and attend in that way."""
        if kind != "padded" and not self.backbone.config._attn_implementation.startswith(attention.PREFIX):
            attention.install(self.backbone)
        self.attention = kind

    @property
    def pads(self) -> bool:
        """Whether the sequences of a micro-batch lie side by side, padded."""
        return self.attention == "padded"

    def hidden(self, input_ids: Tensor, packing: Packing | None = None) -> Tensor:
        """`input_ids` [B, L], padded on the right → the input of `lm_head` [B, L, D], under the routing in force. With
        `packing`, of one packed row.

        Padding needs no mask: attention is causal, so a real token never sees what comes after it. Transformers builds
        a mask where a layer's attention has a window, or where it has no kernel for causal attention.
        """
        if packing is not None:
            with attention.packed(self.attention, packing):
                hidden_1TD: Tensor = self.backbone(
                    input_ids=input_ids, position_ids=packing.positions, use_cache=False
                ).last_hidden_state
            return hidden_1TD
        hidden_BLD: Tensor = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden_BLD

    def spread(self, root: nn.Module, device: torch.device) -> None:
        """The weights are spread over ranks, this one's part on `device`. A call of `root` with a function calls that
        with all weights at hand.
        """
        self._root, self.device = root, device

    def whole(self, compute: Callable[[], Tensor]) -> Tensor:
        """`compute()`, which may use any weights. Where they are spread over ranks, each rank has to come here."""
        if self._root is None:
            return compute()
        computed: Tensor = self._root(compute)
        return computed

    def release(self) -> None:
        """Let go of the other ranks' weights, which a forward without a backward leaves at hand."""
        if isinstance(self._root, FSDPModule):
            self._root.reshard()

    def recover(self) -> None:
        """Be ready for the next forward although one ended halfway, in the same place on all ranks."""
        reset = getattr(self._root, "reset_iter_state", None)
        if reset is not None:
            reset()

    @cached_property
    def facts(self) -> ModelFacts:
        """What the API needs to know of this model."""
        config = self.config
        return ModelFacts(
            architecture=type(self.model).__name__,
            vocab_size=self.lm_head.out_features,
            context_length=int(config.max_position_embeddings),
            config_hash=config_hash(self.model.config.to_dict() | {"class": type(self.model).__name__}),
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
        return self.model.get_input_embeddings().weight is self.lm_head.weight

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
    def check_hidden_leads_to_logits(self) -> None:
        """Raises `UnsupportedModel` if the logits are not `lm_head(hidden)`."""
        tokens = torch.arange(4, device=self.device).view(1, 4) % self.lm_head.out_features
        with routed(None):
            expected = self.whole(lambda: self.model(input_ids=tokens, use_cache=False).logits.float())
            logits = self.whole(lambda: self.lm_head(self.hidden(tokens)).float())
        if not torch.allclose(logits, expected, rtol=1e-3, atol=1e-4):
            raise UnsupportedModel(f"{type(self.model).__name__}: its logits are not lm_head(hidden)")


def check_logits_are_plain(architecture: str, config: PreTrainedConfig) -> None:
    """Raises `UnsupportedModel` if the configuration scales or caps the logits after the unembedding."""
    for key in LOGIT_TRANSFORMS:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise UnsupportedModel(f"{architecture}: `{key}` changes the logits after the unembedding")


def config_hash(config: dict[str, Any]) -> str:
    """SHA-256 (hex) of a model configuration without what does not change the function that it computes."""
    ignored = {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    kept = {key: value for key, value in config.items() if key not in ignored}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
