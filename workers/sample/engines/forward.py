"""The calls of the model that sampling needs, made through transformers so that any decoder with attention works.

Letters in shapes: B sequences, L new tokens, C cached tokens, T rows, D hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor

from workers.model.base import BaseModel, UnsupportedModel
from workers.model.lora import Adapter, Routing, routed
from workers.sample.engines.kv_cache import DecodeView, PrefillView

ALIGNED = 8
"""Decoding sees a multiple of so many cells: the alignment that CUDA's attention kernels want of a mask."""


class Forward:
    """Prefill, decode and unembedding of one base model. It keeps no state between calls."""

    def __init__(self, base: BaseModel) -> None:
        """Raises `UnsupportedModel` if a layer is something else than full or sliding-window attention."""
        self.base = base
        self.device = base.device
        self.vocab_size = base.lm_head.out_features
        parameters = inspect.signature(base.backbone.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        types = set(getattr(base.config, "layer_types", None) or ())
        window = getattr(base.config, "sliding_window", None)
        if others := types - {"full_attention", "sliding_attention"}:
            raise UnsupportedModel(
                f"{type(base.model).__name__} has {min(others)} layers, for which the native engine has no cache: "
                "it can be trained here (-Q train) but not sampled"
            )
        if not types:
            types = {"full_attention"} if window is None else {"sliding_attention"}
        self._layer_types = types
        self._window = window or 0

    def prefill(self, tokens_BL: Tensor, view: PrefillView, offset: int, routing: Routing) -> Tensor:
        """The next L tokens, at positions `offset` …, of prompts padded on the right → hidden [B, L, D].

        Transformers builds the masks itself: it needs none without a window, for no token sees the padding after it.
        """
        positions_1L = torch.arange(offset, offset + tokens_BL.shape[1], device=self.device).unsqueeze(0)
        with routed(routing):
            hidden_BLD: Tensor = self.base.backbone(
                input_ids=tokens_BL,
                position_ids=positions_1L.expand(tokens_BL.shape),
                use_cache=True,
                **{self._cache_argument: view},
            ).last_hidden_state
        return hidden_BLD

    def decode(self, tokens_B: Tensor, positions_B: Tensor, view: DecodeView, length: int, routing: Routing) -> Tensor:
        """One token of each sequence, at its own position → hidden [B, D]. `length`: cells in sight, a multiple of
        `ALIGNED`."""
        with routed(routing):
            hidden_B1D: Tensor = self.base.backbone(
                input_ids=tokens_B.unsqueeze(1),
                position_ids=positions_B.unsqueeze(1),
                attention_mask=self._decode_mask(positions_B, length),
                use_cache=True,
                **{self._cache_argument: view},
            ).last_hidden_state
        return hidden_B1D.squeeze(1)

    def _decode_mask(self, positions_B: Tensor, length: int) -> Tensor | dict[str, Tensor]:
        """0 where position p sees a cell, the dtype's least number elsewhere, [B, 1, 1, C]; by layer type if there are
        two."""
        cells_C = torch.arange(length, device=self.device)
        position_B1 = positions_B.unsqueeze(1)
        later_BC = cells_C > position_B1
        if self._layer_types == {"full_attention"}:
            return self._additive(later_BC)
        sliding = self._additive(later_BC | (cells_C <= position_B1 - self._window))
        if self._layer_types == {"sliding_attention"}:
            return sliding
        return {"full_attention": self._additive(later_BC), "sliding_attention": sliding}

    def _additive(self, hidden_BC: Tensor) -> Tensor:
        dtype = self.base.dtype
        mask = torch.zeros(hidden_BC.shape, dtype=dtype, device=self.device)
        return mask.masked_fill_(hidden_BC, torch.finfo(dtype).min)[:, None, None]

    def logits(self, hidden_TD: Tensor, routing: Routing) -> Tensor:
        """The unembedding, with the adapters' terms, in float32 [T, V]."""
        with routed(routing):
            logits_TV: Tensor = self.base.lm_head(hidden_TD)
        return logits_TV.float()


def route(adapters: Iterable[Adapter | None], row_tokens: int = 1) -> Routing:
    """The routing of sequences that lie ordered by adapter, `row_tokens` rows each."""
    return Routing.of(((adapter, 1) for adapter in adapters), row_tokens=row_tokens)


def cache_bytes_per_token(base: BaseModel) -> int:
    """What one cached token of one sequence takes in all layers together."""
    config = base.config
    if latent := getattr(config, "kv_lora_rank", None):
        width = latent + config.qk_rope_head_dim
    else:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return int(config.num_hidden_layers * width * base.dtype.itemsize)
