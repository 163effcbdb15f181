"""Stacks of experts that carry many LoRA adapters: the fused parameters of mixture-of-experts models.

Transformers keeps the experts of a layer as two stacks, `gate_up_proj` and `down_proj`. Here each expert of each stack
has an A and a B of its own, in every adapter. A row of the call is sent to K experts, which makes K slots; slots are
sorted by expert, and within an expert they stay ordered by adapter. Then one grouped product over all slots is the
base, and each (expert, adapter) is one block of slots with a low-rank term.

Letters in shapes: T rows, K choices per row, S = T·K slots, E experts, D hidden, I inputs and O outputs of a
projection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from workers.model.dispatch import Dispatch
from workers.model.lora import anchor
from workers.model.routing import Term, current_routing

GATE_UP, DOWN = "gate_up_proj", "down_proj"


def is_stack_of_experts(module: nn.Module) -> bool:
    """Whether this is a stack of gated experts as transformers' `use_experts_implementation` describes them."""
    stacks = [getattr(module, name, None) for name in (GATE_UP, DOWN)]
    return (
        all(isinstance(stack, nn.Parameter) and stack.dim() == 3 for stack in stacks)
        and getattr(module, "has_gate", False)
        and not getattr(module, "has_post_expert_norm", False)
        and {name for name, _ in module.named_parameters()} <= {GATE_UP, DOWN, f"{GATE_UP}_bias", f"{DOWN}_bias"}
    )


class LoraExperts(nn.Module):
    """The frozen experts of one layer with room for any number of adapters.

    It shares the parameters of the module that it replaces, and leaves calls without adapters to it. `path` is that
    module's name in the model; its terms are found by `<path>.gate_up_proj` and `<path>.down_proj`.
    """

    def __init__(self, experts: nn.Module, path: str) -> None:
        super().__init__()
        self.experts = experts
        self.path = path
        self._apply_gate: Callable[[Tensor], Tensor] = experts._apply_gate  # type: ignore[assignment]

    def shape(self, name: str) -> tuple[int, int, int]:
        """(E, O, I) of the stack `name`."""
        count, in_features, out_features = self._weight(name).shape
        return count, out_features, in_features

    def _weight(self, name: str) -> Tensor:
        """[E, I, O]."""
        stack: Tensor = getattr(self.experts, name)
        return stack if self.experts.is_transposed else stack.mT

    def _project(self, x_SI: Tensor, name: str, terms: tuple[Term, ...], dispatch: Dispatch) -> Tensor:
        bias = getattr(self.experts, f"{name}_bias") if self.experts.has_bias else None
        result: Tensor = RoutedExperts.apply(x_SI, anchor(x_SI.device), self._weight(name), bias, terms, dispatch)
        return result

    def forward(self, hidden_TD: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """`top_k_index` and `top_k_weights` [T, K], the router's choices and what they count → [T, D]."""
        routing = current_routing()
        terms = {name: routing.terms(f"{self.path}.{name}") if routing else () for name in (GATE_UP, DOWN)}
        if not any(terms.values()):
            plain: Tensor = self.experts(hidden_TD, top_k_index, top_k_weights)
            return plain
        assert routing is not None
        if len(hidden_TD) != routing.rows:
            raise ValueError(f"{self.path}: {len(hidden_TD)} rows, the routing is for {routing.rows}")
        dispatch = Dispatch(top_k_index, len(self._weight(DOWN)), like=hidden_TD)
        gate_up_SO = self._project(hidden_TD[dispatch.rows], GATE_UP, terms[GATE_UP], dispatch)
        down_SD = self._project(self._apply_gate(gate_up_SO), DOWN, terms[DOWN], dispatch)
        weighted_SD = down_SD * top_k_weights.reshape(-1)[dispatch.order].unsqueeze(-1)
        by_row_TKD = weighted_SD[dispatch.place].view(*top_k_index.shape, -1)
        return by_row_TKD.sum(dim=1).to(hidden_TD.dtype)


class RoutedExperts(torch.autograd.Function):
    """x W[e] + bias[e] of the slots of each expert e, plus the terms of the slots' adapters, as one node. See
    `workers.model.lora.RoutedLinear`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_SI: Tensor,
        anchor: Tensor,
        weight_EIO: Tensor,
        bias_EO: Tensor | None,
        terms: tuple[Term, ...],
        dispatch: Dispatch,
    ) -> Tensor:
        y_SO = dispatch.product(x_SI, weight_EIO)
        if bias_EO is not None:
            y_SO.add_(bias_EO[dispatch.experts])
        projected = dispatch.add_terms(y_SO, x_SI, terms)
        ctx.save_for_backward(x_SI, *projected)
        ctx.weight, ctx.terms, ctx.dispatch = weight_EIO, terms, dispatch
        return y_SO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_SI, *projected = ctx.saved_tensors
        g_SO = grads[0].contiguous()
        dx_SI = ctx.dispatch.product(g_SO, ctx.weight.mT) if ctx.needs_input_grad[0] else None
        ctx.dispatch.add_term_grads(g_SO, x_SI, projected, ctx.terms, dx_SI)
        return dx_SI, None, None, None, None, None
