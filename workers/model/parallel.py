"""The base model's weights spread over ranks with FSDP2, each layer whole only while it is used.

The base is frozen, so nothing of it has gradients: a rank gathers a layer's weights before its forward, lets them go
after it, and does the same once more in the backward. Adapters are no parameters of any module here: FSDP never sees
them, and every rank has them whole.

Gathering is a collective, so all ranks have to do the same forwards and backwards in the same order. Two things see to
that: everything is computed inside one root module (`BaseModel.whole`), and the backward goes through every layer, also
where no adapter of the batch trains it, because what comes out of the embedding asks for a gradient.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from workers.model.base import BaseModel, UnsupportedModel


class Whole(nn.Module):
    """The root: what is computed inside of a call has all weights at hand, layer by layer."""

    def __init__(self, base: BaseModel) -> None:
        super().__init__()
        self.backbone = base.backbone
        self.lm_head = base.lm_head

    def forward(self, compute: Callable[[], Tensor]) -> Tensor:
        """A copy of what `compute` returns: FSDP hangs its hooks on outputs, which must not be views for that."""
        return compute().clone()


def empty_model(name_or_path: str | os.PathLike[str], dtype: torch.dtype) -> PreTrainedModel:
    """The model as its configuration describes it, its parameters without memory, its buffers computed."""
    config = AutoConfig.from_pretrained(name_or_path)
    with parameters_on_meta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def spread_over(mesh: DeviceMesh, base: BaseModel, device: torch.device) -> None:
    """Cut each parameter of the text model along its first dimension, one slice for each rank of `mesh`, and give the
    slices memory on `device`: their values come later. What else the model has (a vision tower) stays as it is.

    Raises `UnsupportedModel` if the model has no list of layers.
    """
    layers = getattr(base.backbone, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise UnsupportedModel(f"{type(base.model).__name__} has no list of layers to spread over ranks")
    root = Whole(base)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    buffers = [buffer.clone() for buffer in root.buffers()]
    root.to_empty(device=device)
    for buffer, computed in zip(root.buffers(), buffers, strict=True):
        buffer.copy_(computed)
    base.model.get_input_embeddings().register_forward_hook(_ask_for_gradient)
    base.spread(root, device)


def _ask_for_gradient(module: nn.Module, args: object, embedded: Tensor) -> Tensor:
    return embedded.requires_grad_() if torch.is_grad_enabled() else embedded


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Modules made in this block have their parameters on the meta device; buffers are real."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
