"""Gradient checkpointing: of each decoder layer only the input is kept, and its backward computes the rest once more.

What a layer's call depends on beside its arguments, which rows are whose and how they attend, travels in context
variables. The backward runs after the blocks that set them have ended, on CUDA in another thread, and perhaps after a
forward for others; so the second computation runs in a copy of the context of the first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

from workers.model.targets import UnsupportedModel

AUTO_PARAMETERS = 1_000_000_000
"""From so many parameters on, `auto` checkpoints everything: a second forward costs a third of the step, a third of the
tokens at a time costs more on any device that such a model runs on."""
AUTO_BYTES = 2 * 2**30
"""Of smaller models, `auto` lets a micro-batch keep so many bytes of activations, and checkpoints what needs more."""
HIDDEN_COPIES, MLP_COPIES = 12, 5
"""Numbers that a layer keeps of each token for its backward, in units of the widths of the model and of its MLP;
measured on dense models with adapters on all linear layers."""


def checkpointed_above(setting: Literal["auto", "on", "off"], model: PreTrainedModel) -> int | None:
    """Micro-batches of more tokens than this are checkpointed; 0: all, None: none. Of a model that is spread over
    ranks, all parameters count.
    """
    if setting == "on":
        return 0
    if setting == "off":
        return None
    if sum(parameter.numel() for parameter in model.parameters()) >= AUTO_PARAMETERS:
        return 0
    config = model.config.get_text_config()
    return max(1, AUTO_BYTES // (kept_per_token(config) * next(model.parameters()).element_size()))


def kept_per_token(config: PretrainedConfig) -> int:
    """About how many numbers the layers of a model keep of a token for their backward."""
    experts = getattr(config, "num_experts_per_tok", None) or 1
    mlp = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", 4 * config.hidden_size)
    return int(config.num_hidden_layers * (HIDDEN_COPIES * config.hidden_size + MLP_COPIES * experts * mlp))


def checkpoint_layers(backbone: nn.Module, *, above: int = 0) -> None:
    """Checkpoint every layer of a decoder for micro-batches of more than `above` tokens, whenever gradients are asked
    for. Hooks on a layer (FSDP's gather its weights) stay outside. Raises `UnsupportedModel` if it has no list of
    layers.
    """
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModel(f"{type(backbone).__name__} has no list of layers to checkpoint")
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, above)


def _checkpointed(forward: Callable[..., Any], above: int) -> Callable[..., Any]:
    def call(hidden_BLD: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or hidden_BLD[..., 0].numel() <= above:
            return forward(hidden_BLD, *args, **kwargs)
        in_context = partial(copy_context().run, forward, **kwargs)
        return checkpoint(in_context, hidden_BLD, *args, use_reentrant=False, preserve_rng_state=False)

    return call
