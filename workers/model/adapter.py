"""One run's LoRA weights (SEMANTICS §1).

Letters in shapes: I inputs and O outputs of a layer, R rank, E experts, P all parameters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from app.wire.types import LoraConfig

Shape = tuple[int, ...]
"""(O, I) of a layer, (E, O, I) of a stack of experts."""


class Factors(NamedTuple):
    """One module's views into an adapter: A [R, I], Bᵀ [R, O], and their gradients; [E, …] each for a stack of experts.

    B lies transposed because all products that a pass needs are then of a wide matrix from the left, which BLAS on a
    CPU does two to eight times faster than the same products with a tall one.
    """

    a: Tensor
    b_t: Tensor
    grad_a: Tensor
    grad_b_t: Tensor

    def experts(self, indices: Iterable[int]) -> Iterable[Factors]:
        """Those of single experts, of a stack."""
        return (Factors(self.a[e], self.b_t[e], self.grad_a[e], self.grad_b_t[e]) for e in indices)


class Adapter:
    """One run's LoRA weights, float32.

    All parameters are views into one buffer, `flat` [P], and their gradients are views into another, `grad_flat` [P],
    so that an optimizer step, a clip, a copy is one operation on one tensor. A backward pass adds into `grad_flat` in
    place, so that a parameter that no row reached has gradient 0.

    `shapes`: path → (out_features, in_features), of the layers that this adapter trains, or (experts, out_features,
    in_features) of stacks of experts, each of which has an A and a B of its own; their order is the layout of `flat`.
    `modules`: path → (A [R, I], B [O, R]), or ([E, R, I], [E, O, R]). A fresh adapter has Kaiming-uniform A, as PEFT
    draws it, and B = 0; it depends only on the seed and the paths.
    """

    def __init__(self, config: LoraConfig, shapes: Mapping[str, Shape], device: torch.device | str = "cpu") -> None:
        self.config = config
        self.scale = config.scale
        rank = config.rank
        sizes = {path: _sizes(rank, shape) for path, shape in shapes.items()}
        flat = torch.zeros(sum(size_a + size_b for size_a, size_b in sizes.values()))
        offset = 0
        for path, (size_a, size_b) in sizes.items():
            draw_a(flat[offset : offset + size_a], config.seed, path, shapes[path][-1])
            offset += size_a + size_b
        self.flat = flat.to(device)
        self.grad_flat = torch.zeros_like(self.flat)
        self.has_grad = False
        """Whether anything was added to `grad_flat` since `zero_grad`."""
        self.modules: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self.factors: dict[str, Factors] = {}
        offset = 0
        for path, (*experts, out_features, in_features) in shapes.items():
            size_a, size_b = sizes[path]
            a, grad_a = self._views(offset, size_a, (*experts, rank, in_features))
            b_t, grad_b_t = self._views(offset + size_a, size_b, (*experts, rank, out_features))
            offset += size_a + size_b
            self.factors[path] = Factors(a, b_t, grad_a, grad_b_t)
            self.modules[path] = (_parameter(a, grad_a), _parameter(b_t.mT, grad_b_t.mT))

    def _views(self, offset: int, size: int, shape: Shape) -> tuple[Tensor, Tensor]:
        return self.flat[offset : offset + size].view(shape), self.grad_flat[offset : offset + size].view(shape)

    @property
    def num_parameters(self) -> int:
        """P, the length of `flat`."""
        return self.flat.numel()

    def zero_grad(self) -> None:
        """Forget the gradient, in place."""
        self.grad_flat.zero_()
        self.has_grad = False

    def add_grad(self, grad: Tensor) -> None:
        """Add `grad` [P] to the gradient: a pending one that a snapshot kept, or another rank's."""
        self.grad_flat.add_(grad.to(self.grad_flat.device))
        self.has_grad = True

    def state(self) -> dict[str, Tensor]:
        """`<path>.lora_A` and `<path>.lora_B`, shaped as in `modules`: views, not copies."""
        return {
            f"{path}.lora_{x}": p.detach()
            for path, pair in self.modules.items()
            for x, p in zip("AB", pair, strict=True)
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy weights in. Raises ValueError, before anything is written, if a name or shape is not this adapter's."""
        mine = self.state()
        if missing := mine.keys() - state.keys():
            raise ValueError(f"adapter weights lack {min(missing)!r} and {len(missing) - 1} others")
        if unknown := state.keys() - mine.keys():
            raise ValueError(f"adapter weights hold {min(unknown)!r}, which this adapter does not train")
        for name, tensor in mine.items():
            if state[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(state[name].shape)}, expected {tuple(tensor.shape)}")
        for name, tensor in mine.items():
            tensor.copy_(state[name])


class HostCopy:
    """The weights of an adapter as they are now, in host memory, to be written while it is trained further. `modules`
    and `state` as those of the adapter."""

    def __init__(self, adapter: Adapter) -> None:
        flat = adapter.flat.detach().to("cpu", copy=True)
        self.config = adapter.config
        self.modules = tuple(adapter.modules)
        self._state = {
            name: flat.as_strided(view.shape, view.stride(), view.storage_offset())
            for name, view in adapter.state().items()
        }

    def state(self) -> dict[str, Tensor]:
        """`<path>.lora_A` and `<path>.lora_B`."""
        return self._state


def draw_a(flat: Tensor, seed: int, path: str, in_features: int) -> None:
    """Fill `flat` with the initial A of the module `path`: kaiming_uniform(a=√5), that is U(±1/√I)."""
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    bound = 1 / math.sqrt(in_features)
    flat.uniform_(-bound, bound, generator=generator)


def _sizes(rank: int, shape: Shape) -> tuple[int, int]:
    """How many numbers A and B have."""
    *experts, out_features, in_features = shape
    count = rank * math.prod(experts)
    return count * in_features, count * out_features


def _parameter(data: Tensor, grad: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(data)
    parameter.grad = grad
    return parameter
