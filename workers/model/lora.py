"""Linear layers that carry many LoRA adapters over one frozen weight.

An `Adapter` is one run's weights. A `LoraLinear` is a frozen linear layer of the base model that adds, to each
adapter's own rows, that adapter's low-rank term: one product over all rows, then for each adapter products over its
rows alone. Which rows are whose, says the `Routing` of the call.

Letters in shapes: T rows, I inputs and O outputs of a layer, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.model import grouped, slices
from workers.model.adapter import Adapter, Factors
from workers.model.routing import Routing, Segment, Term, current_routing, routed

__all__ = [
    "Adapter",
    "Factors",
    "LoraLinear",
    "Routing",
    "Segment",
    "Term",
    "add_term_grads",
    "add_terms",
    "anchor",
    "projections",
    "routed",
]


class LoraLinear(nn.Module):
    """A frozen linear layer with room for any number of adapters.

    It shares the weight of the `nn.Linear` that it replaces (also a weight tied to the embedding). `path` is the
    layer's name in the model, by which it finds its terms. `sees_cache`: the model applies it to all tokens of a
    sequence that are in its cache, not to those of the call alone.
    """

    def __init__(self, linear: nn.Linear, path: str, *, sees_cache: bool = False) -> None:
        super().__init__()
        self.path = path
        self.sees_cache = sees_cache
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = linear.weight
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., I] with as many rows as the routing in force → [..., O]. If it sees the cache, the first dimension
        is the sequence.
        """
        routing = current_routing()
        terms = self._terms(x, routing) if routing is not None else ()
        if not terms:
            return F.linear(x, self.weight, self.bias)
        if torch.is_grad_enabled():
            result: Tensor = RoutedLinear.apply(x, anchor(x.device), self.weight, self.bias, terms)
            return result
        y = F.linear(x, self.weight, self.bias)
        add_terms(y.view(-1, self.out_features), x.reshape(-1, self.in_features), terms)
        return y

    def _terms(self, x: Tensor, routing: Routing) -> tuple[Term, ...]:
        rows = x.numel() // self.in_features
        if self.sees_cache:
            return routing.stretched_terms(self.path, x.shape[0], rows)
        terms = routing.terms(self.path)
        if terms and rows != routing.rows:
            raise ValueError(f"{self.path}: {rows} rows, the routing is for {routing.rows}")
        return terms


def add_terms(y_TO: Tensor, x_TI: Tensor, terms: Sequence[Term]) -> list[Tensor]:
    """Add each term to its rows of `y_TO` in place, in the dtype of `x_TI`; returns their A xᵀ [R, rows]."""
    if grouped.suits(x_TI):
        return grouped.add_terms(y_TO, x_TI, terms)
    return slices.add_terms(y_TO, x_TI, terms)


def projections(x_TI: Tensor, terms: Sequence[Term]) -> list[Tensor]:
    """A xᵀ [R, rows] of each term, in the dtype of `x_TI`."""
    if grouped.suits(x_TI):
        return grouped.projections(x_TI, terms)
    return slices.projections(x_TI, terms)


def add_term_grads(
    g_TO: Tensor, x_TI: Tensor, projected: Iterable[Tensor], terms: Sequence[Term], dx_TI: Tensor | None
) -> None:
    """The backward of `add_terms`: adds to the gradients of A and B, and to `dx_TI` unless it is None."""
    if grouped.suits(x_TI):
        grouped.add_term_grads(g_TO, x_TI, projected, terms, dx_TI)
    else:
        slices.add_term_grads(g_TO, x_TI, projected, terms, dx_TI)


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
