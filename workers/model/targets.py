"""Which layers of a model adapters train, and which stay frozen (SEMANTICS §1).

Layers are known by the names that transformers gives them. A layer that holds a matrix and is on none of the lists is
an error: training "all layers" must not leave one out in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from workers.model.adapter import Shape
from workers.model.experts import DOWN, GATE_UP, LoraExperts, is_stack_of_experts
from workers.model.lora import LoraLinear

Group = Literal["attn", "mlp", "unembed"]

SOFTMAX_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT_ATTENTION = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""DeepSeek's, beside `o_proj`."""
LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_qkvz", "in_proj_z", "in_proj_a", "in_proj_b", "in_proj_ba", "out_proj")
"""The gated delta net's of Qwen 3.5 and Qwen3-Next."""
MLP = ("gate_proj", "up_proj", "down_proj")

GROUPS: Mapping[str, Group] = {
    **dict.fromkeys((*SOFTMAX_ATTENTION, *LATENT_ATTENTION, *LINEAR_ATTENTION), "attn"),
    **dict.fromkeys(MLP, "mlp"),
}
"""The last name of a projection's path → which flag of `LoraConfig` trains it."""

SEES_CACHE = frozenset({"kv_b_proj"})
"""Projections that are applied to all cached tokens of a sequence: the cache holds their inputs."""

GATES = frozenset({"shared_expert_gate"})
"""Linear layers that decide how much an expert counts. They stay frozen, as routers do."""


class UnsupportedModel(ValueError):
    """The model at hand cannot be trained or served here; the message names what is in the way."""


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """A linear layer that adapters may train, or a stack of them, one for each of `experts`."""

    group: Group
    in_features: int
    out_features: int
    experts: int | None = None

    @property
    def shape(self) -> Shape:
        """(O, I) or (E, O, I)."""
        shape = (self.out_features, self.in_features)
        return shape if self.experts is None else (self.experts, *shape)


def install(model: PreTrainedModel, backbone: nn.Module) -> dict[str, TargetSpec]:
    """Put layers that carry LoRA in the place of all layers of `model` that adapters may train: path → what it is, in
    the model's order, the unembedding last. A stack of experts has the path of its parameter.

    Raises `UnsupportedModel`, before anything is replaced, if a layer that should carry LoRA cannot.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    layers: dict[str, LoraLinear | LoraExperts] = {}
    targets: dict[str, TargetSpec] = {}
    for module in backbone.modules():
        path = paths[id(module)]
        name = path.rpartition(".")[2]
        if is_stack_of_experts(module):
            experts = LoraExperts(module, path)
            layers[path] = experts
            for parameter in (GATE_UP, DOWN):
                count, out_features, in_features = experts.shape(parameter)
                targets[f"{path}.{parameter}"] = TargetSpec("mlp", in_features, out_features, count)
        elif type(module) is nn.Linear and name in GROUPS:
            layers[path] = LoraLinear(module, path, sees_cache=name in SEES_CACHE)
            targets[path] = TargetSpec(GROUPS[name], module.in_features, module.out_features)
        elif not stays_frozen(module, name):
            raise UnsupportedModel(f"{path} ({type(module).__name__}) cannot carry LoRA")
    if missing := {"attn", "mlp"} - {target.group for target in targets.values()}:
        raise UnsupportedModel(f"{type(model).__name__} has no {' and no '.join(sorted(missing))} layers known here")
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise UnsupportedModel(
            f"the unembedding of {type(model).__name__} is {type(head).__name__}, not a linear layer"
        )
    head_path = paths[id(head)]
    layers[head_path] = LoraLinear(head, head_path)
    targets[head_path] = TargetSpec("unembed", head.in_features, head.out_features)
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
    return targets


def stays_frozen(module: nn.Module, name: str) -> bool:
    """Whether a layer has nothing for an adapter to train: no matrix of its own, or that of an embedding, of a router
    or gate, or of a convolution that keeps channels apart.
    """
    if all(parameter.dim() < 2 for parameter in module.parameters(recurse=False)):
        return True
    if isinstance(module, nn.Conv1d):
        return module.groups == module.in_channels == module.out_channels
    return isinstance(module, nn.Embedding) or type(module).__name__.endswith("Router") or name in GATES
