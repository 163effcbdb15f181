"""Adapters that others have made with PEFT, as adapters of ours that compute the same.

Ours have one rank and one scale, and train attention, MLP or unembedding whole. So a layer of a smaller rank gets
rows of A as a fresh adapter has them, with a B of zeros; a layer of another scale has that in its B; and a layer of a
group that the files have no weights for begins as a fresh one does. None of that changes what the adapter computes, and
all of it can be trained on. What has no such form is refused by its name.

Letters in shapes: I inputs and O outputs of a layer, R rank, E experts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.wire.types import LoraConfig
from workers.model.adapter import Adapter
from workers.model.base import BaseModel
from workers.model.export import CONFIG_FILE, WEIGHTS_FILE, BadAdapterFile, read_config
from workers.model.peft_layout import PREFIX, own_names, unflattened

_SAYS_NOTHING = frozenset(
    {
        "alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "exclude_modules",
        "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
        "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
        "runtime_config", "target_modules", "target_parameters", "task_type", "use_rslora",
    }
)  # fmt: skip
"""Options that are read, or that the names and shapes of the weights repeat, or that only PEFT's training is about."""
_HARMLESS_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Ways to begin that leave the base model's weights as they are."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ALLOWED_TASKS = ("CAUSAL_LM", None)
IsBaseWeight = Callable[[str, Tensor], bool]
"""Whether a tensor is the weight of that name in the base model: PEFT saves such copies along with adapters of the
unembedding."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """Factors [R, I], [O, R] or [E, R, I], [E, O, R], and the factor of their product."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[-2]


@dataclass(frozen=True, slots=True)
class Converted:
    """The adapter, and the layers of its groups that the files have no weights for."""

    adapter: Adapter
    fresh: list[str]


def convert(
    base: BaseModel, config: Mapping[str, Any], weights: Mapping[str, Tensor], *, max_rank: int, is_base: IsBaseWeight
) -> Converted:
    """The adapter of PEFT's `adapter_config.json` and `adapter_model.safetensors`, on the device of `base`.

    Raises `BadAdapterFile` for what is not an adapter of this model, or none that can be expressed, or of a rank above
    `max_rank`.
    """
    _check_options(config)
    layers = _layers(base, config, _factors(base, weights, is_base))
    rank = max(layer.rank for layer in layers.values())
    if rank > max_rank:
        raise BadAdapterFile(f"{CONFIG_FILE}: r={rank} is above the limit of {max_rank} (TINWORKS_MAX_LORA_RANK)")
    groups = {base.targets[path].group for path in layers}
    scales = {layer.scale for layer in layers.values()}
    alpha = _alpha(config, rank, scales)
    adapter = base.new_adapter(
        LoraConfig(
            rank=rank,
            seed=0,
            train_attn="attn" in groups,
            train_mlp="mlp" in groups,
            train_unembed="unembed" in groups,
            alpha=alpha,
        )
    )
    for path, layer in layers.items():
        a, b = (factor.detach() for factor in adapter.modules[path])
        a[..., : layer.rank, :] = layer.a.float()
        b[..., : layer.rank] = layer.b.float() * (layer.scale / adapter.scale)
    return Converted(adapter, [path for path in adapter.modules if path not in layers])


def _alpha(config: Mapping[str, Any], rank: int, scales: set[float]) -> float:
    """Such that the common scale is the files' own, to the last bit where all layers have one; else the largest."""
    plain = float(config["lora_alpha"])
    if scales == {plain / rank}:
        return plain
    return max(scales) * rank


def _check_options(config: Mapping[str, Any]) -> None:
    read_config(config)
    for key, value in config.items():
        if key not in _SAYS_NOTHING and value not in (None, False, {}, [], "", "none"):
            raise BadAdapterFile(f"{CONFIG_FILE}: {key}={value!r} is not supported")
    start = config.get("init_lora_weights", True)
    if start not in _HARMLESS_STARTS:
        raise BadAdapterFile(
            f"{CONFIG_FILE}: init_lora_weights={start!r} changes the base model; convert the adapter with PEFT first"
        )
    if config.get("task_type") not in _ALLOWED_TASKS:
        raise BadAdapterFile(f"{CONFIG_FILE}: task_type={config['task_type']!r} is not supported")


def _factors(base: BaseModel, weights: Mapping[str, Tensor], is_base: IsBaseWeight) -> dict[str, dict[str, Tensor]]:
    """path → "lora_A" and "lora_B" → tensor, in our shapes. Raises BadAdapterFile."""
    known = own_names(base.targets)
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in weights.items():
        if name not in known:
            if "lora_" not in name and is_base(name.removeprefix(PREFIX).replace(".base_layer.", "."), tensor):
                continue
            kind = "a layer that can be trained here" if "lora_" in name else "a LoRA weight"
            raise BadAdapterFile(f"{WEIGHTS_FILE}: {name!r} is not {kind}")
        if tensor.dtype not in _FLOATS:
            raise BadAdapterFile(f"{WEIGHTS_FILE}: {name!r} has dtype {tensor.dtype}, not a plain float")
        if not torch.isfinite(tensor).all():
            raise BadAdapterFile(f"{WEIGHTS_FILE}: {name!r} holds numbers that are not finite")
        path, factor = known[name]
        try:
            found.setdefault(path, {})[factor] = unflattened(factor, tensor, base.targets[path].experts)
        except ValueError as error:
            raise BadAdapterFile(f"{WEIGHTS_FILE}: {name!r}: {error}") from None
    if not found:
        raise BadAdapterFile(f"{WEIGHTS_FILE}: holds no weights")
    return found


def _layers(
    base: BaseModel, config: Mapping[str, Any], factors: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, _Layer]:
    layers = {}
    for path, pair in factors.items():
        for factor in ("lora_A", "lora_B"):
            if factor not in pair:
                raise BadAdapterFile(f"{WEIGHTS_FILE}: {path} has no {factor}")
        rank, scale = _rank_and_scale(config, path, is_stack=base.targets[path].experts is not None)
        *experts, out_features, in_features = base.targets[path].shape
        for factor, shape in (("lora_A", (*experts, rank, in_features)), ("lora_B", (*experts, out_features, rank))):
            if tuple(pair[factor].shape) != shape:
                raise BadAdapterFile(
                    f"{WEIGHTS_FILE}: {path}.{factor} has shape {tuple(pair[factor].shape)}, expected {shape}"
                )
        layers[path] = _Layer(pair["lora_A"], pair["lora_B"], scale)
    return layers


def _rank_and_scale(config: Mapping[str, Any], path: str, *, is_stack: bool) -> tuple[int, float]:
    """What the configuration says of one layer: patterns go before `r` and `lora_alpha`."""
    values = []
    for option, pattern_option in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")):
        patterns = config.get(pattern_option) or {}
        if not isinstance(patterns, dict) or (patterns and is_stack):
            raise BadAdapterFile(
                f"{CONFIG_FILE}: {pattern_option}={patterns!r} is not supported, for stacks of experts at least"
            )
        try:
            matching = [value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", path)]
        except re.error as error:
            raise BadAdapterFile(f"{CONFIG_FILE}: {pattern_option}: {error}") from error
        values.append(matching[0] if matching else config[option])
    rank, alpha = values
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)) or not alpha > 0:
        raise BadAdapterFile(f"{CONFIG_FILE}: {path} has rank {rank!r} and alpha {alpha!r}; both must be positive")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
