"""The slots of one call of a stack of experts, and products over them.

With grouped products nothing waits for the device. Without them, the slots are cut into blocks, one for each adapter
and expert that meet, and each block is a term of its own.

Letters in shapes: T rows, K choices per row, S = T·K slots, s slots of an adapter, E experts, I inputs and O outputs of
a projection, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import torch
from torch import Tensor

from workers.model import grouped, slices
from workers.model.routing import Term


class Dispatch:
    """Slots sorted by expert. Slot number t·K + k, before sorting, is choice k of row t.

    `order` [S]: the number of each sorted slot. `place` [S]: where each number is among the sorted. `experts` [S] and
    `rows` [S]: of each sorted slot.
    """

    def __init__(self, top_k_index: Tensor, num_experts: int, *, like: Tensor) -> None:
        self.choices = top_k_index.shape[1]
        self.num_experts = num_experts
        self.numbered = top_k_index.reshape(-1)
        self.experts, self.order = torch.sort(self.numbered, stable=True)
        self.rows = self.order // self.choices
        self.place = torch.empty_like(self.order)
        self.place[self.order] = torch.arange(len(self.order), device=self.order.device)
        self._grouped = grouped.suits(like)

    @cached_property
    def ends(self) -> Tensor:
        """Where the slots of each expert end, int32 [E]."""
        return self._ends(self.experts)

    def _ends(self, sorted_experts: Tensor) -> Tensor:
        every = torch.arange(self.num_experts, device=sorted_experts.device)
        return torch.searchsorted(sorted_experts, every, right=True, out_int32=True)

    def product(self, x_SI: Tensor, weight_EIO: Tensor) -> Tensor:
        """[S, O]: the slots of each expert times its matrix."""
        if self._grouped and grouped.aligned(x_SI.dtype, *weight_EIO.shape[1:]):
            return grouped.row_groups(x_SI, weight_EIO, self.ends)
        y_SO = x_SI.new_empty(len(x_SI), weight_EIO.shape[2])
        start = 0
        for expert, end in enumerate(self._host_ends):
            if end > start:
                torch.mm(x_SI[start:end], weight_EIO[expert], out=y_SO[start:end])
            start = end
        return y_SO

    @cached_property
    def _host_ends(self) -> list[int]:
        ends: list[int] = self.ends.tolist()
        return ends

    def add_terms(self, y_SO: Tensor, x_SI: Tensor, terms: Sequence[Term]) -> list[Tensor]:
        """Add each term, whose rows are those of the call, to their slots of `y_SO` in place; returns what
        `add_term_grads` needs."""
        if not self._fits(x_SI, terms):
            return slices.add_terms(y_SO, x_SI, self.blocks(terms))
        projected = []
        for term, (slots_s, ends_E) in zip(terms, map(self._slots, terms), strict=True):
            a_ERI, b_ERO = (x.to(x_SI.dtype) for x in term.factors[:2])
            low_sR = grouped.row_groups(x_SI[slots_s], a_ERI.mT, ends_E)
            y_SO.index_add_(0, slots_s, grouped.row_groups(low_sR, b_ERO, ends_E), alpha=term.scale)
            projected.append(low_sR)
        return projected

    def add_term_grads(
        self, g_SO: Tensor, x_SI: Tensor, projected: Iterable[Tensor], terms: Sequence[Term], dx_SI: Tensor | None
    ) -> None:
        """The backward of `add_terms`: adds to the gradients of A and B, and to `dx_SI` unless it is None."""
        if not self._fits(x_SI, terms):
            slices.add_term_grads(g_SO, x_SI, projected, self.blocks(terms), dx_SI)
            return
        for term, low_sR in zip(terms, projected, strict=True):
            slots_s, ends_E = self._slots(term)
            a_ERI, b_ERO = (x.to(x_SI.dtype) for x in term.factors[:2])
            g_sO = g_SO[slots_s]
            g_low_sR = grouped.row_groups(g_sO, b_ERO.mT, ends_E)
            term.factors.grad_b_t.add_(grouped.column_groups(low_sR.t(), g_sO, ends_E), alpha=term.scale)
            term.factors.grad_a.add_(grouped.column_groups(g_low_sR.t(), x_SI[slots_s], ends_E), alpha=term.scale)
            if dx_SI is not None:
                dx_SI.index_add_(0, slots_s, grouped.row_groups(g_low_sR, a_ERI, ends_E), alpha=term.scale)

    def _fits(self, x_SI: Tensor, terms: Sequence[Term]) -> bool:
        return self._grouped and all(
            grouped.aligned(x_SI.dtype, *term.factors.a.shape[1:], term.factors.b_t.shape[2]) for term in terms
        )

    def _slots(self, term: Term) -> tuple[Tensor, Tensor]:
        """The sorted slots of a term, ascending, and where those of each expert end among them, int32 [E]."""
        numbers = slice(term.start * self.choices, term.stop * self.choices)
        own_experts, own_order = torch.sort(self.numbered[numbers], stable=True)
        return self.place[numbers][own_order], self._ends(own_experts)

    def blocks(self, terms: Sequence[Term]) -> list[Term]:
        """The terms over sorted slots: for each, one of every expert that any of its rows chose."""
        numbered = self._host_numbered
        begins = [0, *self._host_ends[:-1]]
        blocks: list[Term] = []
        for term in terms:
            first, last = term.start * self.choices, term.stop * self.choices
            skipped = torch.bincount(numbered[:first], minlength=self.num_experts).tolist()
            counts = torch.bincount(numbered[first:last], minlength=self.num_experts).tolist()
            met = [expert for expert, count in enumerate(counts) if count]
            for expert, factors in zip(met, term.factors.experts(met), strict=True):
                start = begins[expert] + skipped[expert]
                blocks.append(Term(start, start + counts[expert], factors, term.scale))
        return blocks

    @cached_property
    def _host_numbered(self) -> Tensor:
        return self.numbered.cpu()
