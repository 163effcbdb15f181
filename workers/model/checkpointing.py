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

from workers.model.targets import UnsupportedModel

AUTO_PARAMETERS = 1_000_000_000
"""From so many parameters on, `auto` is on: below it, activations of a micro-batch are small change on any device that
is worth its while, and the second forward would cost a third of the step."""


def is_wanted(setting: Literal["auto", "on", "off"], model: nn.Module) -> bool:
    """Whether `model` is to be checkpointed. Of a model that is spread over ranks, all parameters count."""
    if setting == "auto":
        return sum(parameter.numel() for parameter in model.parameters()) >= AUTO_PARAMETERS
    return setting == "on"


def checkpoint_layers(backbone: nn.Module) -> None:
    """Checkpoint every layer of a decoder, whenever gradients are asked for. Hooks on a layer (FSDP's gather its
    weights) stay outside. Raises `UnsupportedModel` if it has no list of layers.
    """
    layers = getattr(backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModel(f"{type(backbone).__name__} has no list of layers to checkpoint")
    for layer in layers:
        layer.forward = _checkpointed(layer.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        in_context = partial(copy_context().run, forward, **kwargs)
        return checkpoint(in_context, *args, use_reentrant=False, preserve_rng_state=False)

    return call
