"""The adapters' terms as a loop over slices of rows, a few products for each: on a CPU, or where there is but one term.

`add_terms`, `projections` and `add_term_grads` are the same as those of `workers.model.grouped`.

Letters in shapes: T rows, t rows of a term, I inputs and O outputs of a layer, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from workers.model.routing import Term


def add_terms(y_TO: Tensor, x_TI: Tensor, terms: Sequence[Term]) -> list[Tensor]:
    """Add each term to its rows of `y_TO` in place, in the dtype of `x_TI`; returns their A xᵀ [R, t]."""
    projected = projections(x_TI, terms)
    for (start, stop, factors, scale), low_Rt in zip(terms, projected, strict=True):
        y_TO[start:stop].addmm_(low_Rt.t(), factors.b_t.to(y_TO.dtype), alpha=scale)
    return projected


def projections(x_TI: Tensor, terms: Sequence[Term]) -> list[Tensor]:
    """A xᵀ [R, t] of each term, in the dtype of `x_TI`."""
    return [torch.mm(term.factors.a.to(x_TI.dtype), x_TI[term.start : term.stop].t()) for term in terms]


def add_term_grads(
    g_TO: Tensor, x_TI: Tensor, projected: Iterable[Tensor], terms: Sequence[Term], dx_TI: Tensor | None
) -> None:
    """The backward of `add_terms`: adds to the gradients of A and B, and to `dx_TI` unless it is None."""
    for (start, stop, factors, scale), low_Rt in zip(terms, projected, strict=True):
        g_tO, x_tI = g_TO[start:stop], x_TI[start:stop]
        g_low_Rt = torch.mm(factors.b_t.to(g_TO.dtype), g_tO.t())
        accumulate(factors.grad_b_t, low_Rt, g_tO, scale)
        accumulate(factors.grad_a, g_low_Rt, x_tI, scale)
        if dx_TI is not None:
            dx_TI[start:stop].addmm_(g_low_Rt.t(), factors.a.to(g_TO.dtype), alpha=scale)


def accumulate(grad: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """grad += scale · left @ right, in float32 also where the operands are bfloat16."""
    if left.dtype == grad.dtype:
        grad.addmm_(left, right, alpha=scale)
    elif left.is_cuda:
        grad.add_(torch.mm(left, right, out_dtype=torch.float32), alpha=scale)
    else:
        grad.addmm_(left.float(), right.float(), alpha=scale)
