"""How PEFT names and shapes the weights of an adapter, and which of its options target them.

A projection is what it is everywhere: `<path>.lora_A.weight` [R, I] and `<path>.lora_B.weight` [O, R].

A stack of E experts is a parameter, not a module, so PEFT targets it by `target_parameters` and wraps the module that
holds it: first for `gate_up_proj`, then, around that, for `down_proj`. The inner one's weights have `.base_layer` in
their names. PEFT stores both factors flat: A as [E·R, I], expert by expert, and B as [O, R·E], in which the experts of
one rank index lie side by side. Gate and up projection of an expert share one A, as their weights are one matrix.

In models with stacks the other MLP projections (shared experts, dense layers) are named in `target_parameters` too, as
`<name>.weight`: PEFT takes their names in `target_modules` for those of experts, as older versions of transformers
stored them, and would leave these layers without their adapter. The weights' names and shapes are the same either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from workers.model.base import BaseModel
from workers.model.experts import GATE_UP
from workers.model.targets import TargetSpec

PREFIX = "base_model.model."


def weight_name(path: str, target: TargetSpec, factor: str) -> str:
    """The name of the weights of `factor`, "lora_A" or "lora_B"."""
    if target.experts is None:
        return f"{PREFIX}{path}.{factor}.weight"
    holder, _, name = path.rpartition(".")
    inner = ".base_layer" if name == GATE_UP else ""
    return f"{PREFIX}{holder}{inner}.{factor}.weight"


def flattened(factor: str, tensor: Tensor) -> Tensor:
    """A factor of an adapter as PEFT stores it, not always contiguous: [E, R, I] → [E·R, I], [E, O, R] → [O, R·E]."""
    if tensor.dim() == 3:
        return tensor.flatten(0, 1) if factor == "lora_A" else tensor.permute(1, 2, 0).flatten(1)
    return tensor


def unflattened(factor: str, tensor: Tensor, experts: int | None) -> Tensor:
    """The reverse. Raises ValueError if the shape is none of a factor of so many experts."""
    if experts is None:
        return tensor
    size = tensor.shape[0 if factor == "lora_A" else 1] if tensor.dim() == 2 else 1
    if size % experts:
        raise ValueError(f"shape {tuple(tensor.shape)} is not that of {factor} of {experts} experts")
    if factor == "lora_A":
        return tensor.view(experts, -1, tensor.shape[1])
    return tensor.reshape(tensor.shape[0], -1, experts).permute(2, 0, 1)


def own_names(targets: Mapping[str, TargetSpec]) -> dict[str, tuple[str, str]]:
    """PEFT's name of each weight that an adapter of these targets may have → (path, "lora_A" or "lora_B")."""
    return {
        weight_name(path, target, factor): (path, factor)
        for path, target in targets.items()
        for factor in ("lora_A", "lora_B")
    }


def targeting(base: BaseModel, paths: Iterable[str]) -> dict[str, list[str]]:
    """`target_modules` and, if there are stacks of experts, `target_parameters` for the targets `paths`."""
    targets = {path: base.targets[path] for path in paths}
    if all(target.experts is None for target in targets.values()):
        return {"target_modules": _module_names(base, targets)}
    parameters = set()
    for path, target in targets.items():
        if target.experts is not None:
            parameters.add(".".join(path.split(".")[-2:]))
        elif target.group == "mlp":
            parameters.add(f"{path.rpartition('.')[2]}.weight")
    others = [path for path, target in targets.items() if target.group != "mlp"]
    return {"target_modules": _module_names(base, others), "target_parameters": sorted(parameters)}


def _module_names(base: BaseModel, paths: Iterable[str]) -> list[str]:
    """The last names of the paths; whole paths where the last name means layers too that adapters do not train, those
    of a vision tower for instance."""
    foreign = {name.rpartition(".")[2] for name, module in base.model.named_modules() if isinstance(module, nn.Linear)}
    leaves = {path: path.rpartition(".")[2] for path in paths}
    return sorted({path if leaf in foreign else leaf for path, leaf in leaves.items()})
