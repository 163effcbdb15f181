"""Many LoRA adapters over one set of frozen weights.

An `Adapter` is one run's weights. A `LoraLinear` is a frozen linear layer of the base model that adds, to each
adapter's own rows, that adapter's low-rank term. Which rows belong to which adapter is a `Routing`, and it belongs to
the call:

    with routed(Routing.of([(adapter_a, 128), (None, 64), (adapter_b, 64)])):
        hidden = base.hidden(tokens)

It travels in a `ContextVar`, so a training and a sampling thread share the layers without seeing each other's adapters.
A row is one token of a flattened batch. Rows lie ordered by adapter, so that each adapter is one slice: it pays for its
own rank, its own rows and its own targets, and for nobody else's.

Letters in shapes: T rows, I inputs and O outputs of a layer, R rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.wire.types import LoraConfig


class Adapter:
    """One run's LoRA weights (SEMANTICS §1), float32.

    All parameters are views into one buffer, `flat` [P], and their gradients are views into another, `grad_flat` [P],
    so that an optimizer step, a clip, a copy is one operation on one tensor. A backward pass adds into `grad_flat` in
    place.

    `shapes`: module path → (out_features, in_features), of the modules that this adapter trains; their order is the
    layout of `flat`. `modules`: module path → (A [R, I], B [O, R]). A fresh adapter has Kaiming-uniform A, as PEFT
    draws it, and B = 0; it depends only on the seed and the modules' names.
    """

    def __init__(
        self, config: LoraConfig, shapes: Mapping[str, tuple[int, int]], device: torch.device | str = "cpu"
    ) -> None:
        self.config = config
        self.scale = config.scale
        rank = config.rank
        flat = torch.zeros(sum(rank * (out_features + in_features) for out_features, in_features in shapes.values()))
        offset = 0
        for path, (out_features, in_features) in shapes.items():
            draw_a(flat[offset : offset + rank * in_features], config.seed, path, in_features)
            offset += rank * (in_features + out_features)
        self.flat = flat.to(device)
        self.grad_flat = torch.zeros_like(self.flat)
        self.has_grad = False
        """Whether anything was added to `grad_flat` since `zero_grad`."""
        self.modules: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        self.factors: dict[str, Factors] = {}
        offset = 0
        for path, (out_features, in_features) in shapes.items():
            a, grad_a, offset = self._view(offset, in_features)
            b_t, grad_b_t, offset = self._view(offset, out_features)
            self.factors[path] = Factors(a, b_t, grad_a, grad_b_t)
            self.modules[path] = (_parameter(a, grad_a), _parameter(b_t.t(), grad_b_t.t()))

    def _view(self, offset: int, columns: int) -> tuple[Tensor, Tensor, int]:
        rank, end = self.config.rank, offset + self.config.rank * columns
        return self.flat[offset:end].view(rank, columns), self.grad_flat[offset:end].view(rank, columns), end

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
        """`<path>.lora_A` [R, I] and `<path>.lora_B` [O, R] for each module: views, not copies."""
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


def draw_a(flat: Tensor, seed: int, path: str, in_features: int) -> None:
    """Fill `flat` [R·I] with the initial A of the module `path`: kaiming_uniform(a=√5), that is U(±1/√I)."""
    digest = hashlib.sha256(f"{seed}:{path}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    bound = 1 / math.sqrt(in_features)
    flat.uniform_(-bound, bound, generator=generator)


def _parameter(data: Tensor, grad: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(data)
    parameter.grad = grad
    return parameter


class Factors(NamedTuple):
    """One module's views into an adapter: A [R, I], Bᵀ [R, O], and their gradients.

    B lies transposed because all products that a pass needs are then of a wide matrix from the left, which BLAS on a
    CPU does two to eight times faster than the same products with a tall one.
    """

    a: Tensor
    b_t: Tensor
    grad_a: Tensor
    grad_b_t: Tensor


class Segment(NamedTuple):
    """The rows `start` … `stop`-1 of a call belong to `adapter`."""

    adapter: Adapter
    start: int
    stop: int


class Term(NamedTuple):
    """What one adapter adds in one layer to the rows `start` … `stop`-1: scale·(x Aᵀ) Bᵀ."""

    start: int
    stop: int
    factors: Factors
    scale: float


@dataclass(frozen=True, eq=False)
class Routing:
    """Which of the `rows` rows of a call belong to which adapter. Rows in no segment see the bare base model."""

    rows: int
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, counts: Iterable[tuple[Adapter | None, int]], *, row_tokens: int = 1) -> Routing:
        """From (adapter or None for the base model, number of sequences) in batch order, each sequence `row_tokens`
        rows long. Neighbours of one adapter become one segment.
        """
        segments: list[Segment] = []
        start = 0
        for adapter, count in counts:
            stop = start + count * row_tokens
            if adapter is not None and stop > start:
                if segments and segments[-1].adapter is adapter and segments[-1].stop == start:
                    segments[-1] = segments[-1]._replace(stop=stop)
                else:
                    segments.append(Segment(adapter, start, stop))
            start = stop
        return cls(start, tuple(segments))

    @cached_property
    def _terms(self) -> dict[str, tuple[Term, ...]]:
        found: dict[str, list[Term]] = {}
        for adapter, start, stop in self.segments:
            for path, factors in adapter.factors.items():
                found.setdefault(path, []).append(Term(start, stop, factors, adapter.scale))
        return {path: tuple(terms) for path, terms in found.items()}

    def terms(self, path: str) -> tuple[Term, ...]:
        """The low-rank terms of the layer `path`, in row order; empty if no adapter here trains it."""
        return self._terms.get(path, ())


_routing: ContextVar[Routing | None] = ContextVar("tinworks_routing", default=None)


@contextmanager
def routed(routing: Routing | None) -> Iterator[None]:
    """Calls of the model inside this block, in this thread, use `routing`; None is the bare base model."""
    token = _routing.set(routing)
    try:
        yield
    finally:
        _routing.reset(token)


class LoraLinear(nn.Module):
    """A frozen linear layer with room for any number of adapters.

    It shares the weight of the `nn.Linear` that it replaces (also a weight tied to the embedding). `path` is the
    layer's name in the model, by which it finds its terms.
    """

    def __init__(self, linear: nn.Linear, path: str) -> None:
        super().__init__()
        self.path = path
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., I] with as many rows as the routing in force → [..., O]."""
        routing = _routing.get()
        terms = routing.terms(self.path) if routing is not None else ()
        if not terms:
            return F.linear(x, self.weight, self.bias)
        assert routing is not None
        if x.numel() != routing.rows * self.in_features:
            raise ValueError(f"{self.path}: {x.numel() // self.in_features} rows, the routing is for {routing.rows}")
        if torch.is_grad_enabled():
            result: Tensor = RoutedLinear.apply(x, anchor(x.device), self.weight, self.bias, terms)
            return result
        y = F.linear(x, self.weight, self.bias)
        add_terms(y.view(-1, self.out_features), x.reshape(-1, self.in_features), terms)
        return y


def add_terms(y_TO: Tensor, x_TI: Tensor, terms: tuple[Term, ...]) -> list[Tensor]:
    """Add each term to its rows of `y_TO` in place, in the dtype of `x_TI`; returns their A xᵀ [R, rows]."""
    projected = projections(x_TI, terms)
    for (start, stop, factors, scale), low_Rt in zip(terms, projected, strict=True):
        y_TO[start:stop].addmm_(low_Rt.t(), factors.b_t.to(y_TO.dtype), alpha=scale)
    return projected


def projections(x_TI: Tensor, terms: tuple[Term, ...]) -> list[Tensor]:
    """A xᵀ [R, rows] of each term, in the dtype of `x_TI`."""
    return [torch.mm(term.factors.a.to(x_TI.dtype), x_TI[term.start : term.stop].t()) for term in terms]


def add_term_grads(
    g_TO: Tensor, x_TI: Tensor, projected: Iterable[Tensor], terms: tuple[Term, ...], dx_TI: Tensor | None
) -> None:
    """The backward of `add_terms`: adds to the gradients of A and B, and to `dx_TI` unless it is None."""
    for (start, stop, factors, scale), low_Rt in zip(terms, projected, strict=True):
        g_tO, x_tI = g_TO[start:stop], x_TI[start:stop]
        g_low_Rt = torch.mm(factors.b_t.to(g_TO.dtype), g_tO.t())
        _accumulate(factors.grad_b_t, low_Rt, g_tO, scale)
        _accumulate(factors.grad_a, g_low_Rt, x_tI, scale)
        if dx_TI is not None:
            dx_TI[start:stop].addmm_(g_low_Rt.t(), factors.a.to(g_TO.dtype), alpha=scale)


def _accumulate(grad: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """grad += scale · left @ right, in float32 also where the operands are bfloat16."""
    if left.dtype == grad.dtype:
        grad.addmm_(left, right, alpha=scale)
    elif left.is_cuda:
        grad.add_(torch.mm(left, right, out_dtype=torch.float32), alpha=scale)
    else:
        grad.addmm_(left.float(), right.float(), alpha=scale)


class RoutedLinear(torch.autograd.Function):
    """x Wᵀ + bias plus the terms of the rows' adapters, as one node.

    The backward adds the gradients of A and B straight into their `.grad` views: no temporary of their size, and no
    accumulation node for each of them. `anchor` is there only so that autograd comes back here when `x` needs no
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, weight: Tensor, bias: Tensor | None, terms: tuple[Term, ...]
    ) -> Tensor:
        x_TI = x.reshape(-1, x.shape[-1])
        y_TO = F.linear(x_TI, weight, bias)
        projected = add_terms(y_TO, x_TI, terms)
        ctx.save_for_backward(x_TI, *projected)
        ctx.weight, ctx.terms, ctx.shape = weight, terms, x.shape
        return y_TO.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        x_TI, *projected = ctx.saved_tensors
        g_TO = grads[0].reshape(-1, grads[0].shape[-1])
        dx_TI = torch.mm(g_TO, ctx.weight) if ctx.needs_input_grad[0] else None
        add_term_grads(g_TO, x_TI, projected, ctx.terms, dx_TI)
        return (None if dx_TI is None else dx_TI.view(ctx.shape)), None, None, None, None


_anchors: dict[torch.device, Tensor] = {}


def anchor(device: torch.device) -> Tensor:
    """An empty tensor that requires a gradient and never gets one."""
    if device not in _anchors:
        _anchors[device] = torch.empty(0, device=device, requires_grad=True)
    return _anchors[device]
