"""The adapters' terms as grouped matrix products: one kernel for all adapters of a rank, or all experts of a stack.

`add_terms`, `projections` and `add_term_grads` are the same as those of `workers.model.slices`, which they call for
what a grouped product cannot take. Products come out in the dtype of their operands, sums over them are float32.

Letters in shapes: T rows, t rows of a group of terms, G terms of a group, I inputs and O outputs of a layer, R rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.model import slices
from workers.model.routing import Term

ALIGNMENT_BYTES = 16
"""What the kernel wants the rows of its operands to be a multiple of."""


def suits(like: Tensor) -> bool:
    """Whether the kernel is there for tensors like this one: CUDA from compute capability 8.0 on, 16-bit numbers."""
    return like.is_cuda and like.dtype.itemsize == 2 and _has_kernel(like.device)


@lru_cache
def _has_kernel(device: torch.device) -> bool:
    return hasattr(F, "grouped_mm") and torch.cuda.get_device_capability(device) >= (8, 0)


def aligned(dtype: torch.dtype, *sizes: int) -> bool:
    """Whether rows of so many elements are what the kernel wants."""
    return all(size * dtype.itemsize % ALIGNMENT_BYTES == 0 for size in sizes)


def row_groups(x_TI: Tensor, weights_GIO: Tensor, ends_G: Tensor) -> Tensor:
    """[T, O]: each group of rows of `x_TI` times its own matrix. `ends_G` int32: where the groups end."""
    product_TO: Tensor = F.grouped_mm(x_TI, weights_GIO, offs=ends_G)
    return product_TO


def column_groups(left_RT: Tensor, right_TO: Tensor, ends_G: Tensor) -> Tensor:
    """[G, R, O]: each group of columns of `left_RT` times its rows of `right_TO`; 0 for an empty group."""
    product_GRO: Tensor = F.grouped_mm(left_RT, right_TO, offs=ends_G)
    empty_G = ends_G == torch.cat((ends_G.new_zeros(1), ends_G[:-1]))
    return product_GRO.masked_fill_(empty_G.view(-1, 1, 1), 0)


class Group:
    """Terms of one rank, two or more, and their rows."""

    def __init__(self, terms: Sequence[Term], dtype: torch.dtype, device: torch.device) -> None:
        self.terms = terms
        self.lengths = [term.stop - term.start for term in terms]
        self._dtype = dtype
        self._device = device
        first, last = terms[0].start, terms[-1].stop
        self._rows = slice(first, last) if last - first == sum(self.lengths) else None

    @cached_property
    def ends(self) -> Tensor:
        """Where each term's rows end within the group, int32 [G]."""
        return _ends(tuple(self.lengths), self._device)

    @cached_property
    def a_GRI(self) -> Tensor:
        """All A."""
        return torch.stack([term.factors.a for term in self.terms]).to(self._dtype)

    @cached_property
    def b_GRO(self) -> Tensor:
        """All Bᵀ, times their scales."""
        stacked = torch.stack([term.factors.b_t for term in self.terms])
        scales = [term.scale for term in self.terms]
        if len(set(scales)) == 1:
            return stacked.mul_(scales[0]).to(self._dtype)
        return torch.stack([b_t * scale for b_t, scale in zip(stacked.unbind(), scales, strict=True)]).to(self._dtype)

    def take(self, all_TI: Tensor) -> Tensor:
        """The group's rows."""
        if self._rows is not None:
            return all_TI[self._rows]
        return torch.cat([all_TI[term.start : term.stop] for term in self.terms])

    def add(self, all_TO: Tensor, own_tO: Tensor) -> None:
        """Add to the group's rows in place."""
        if self._rows is not None:
            all_TO[self._rows].add_(own_tO)
            return
        pieces = own_tO.split(self.lengths)
        torch._foreach_add_([all_TO[term.start : term.stop] for term in self.terms], list(pieces))


@lru_cache(maxsize=256)
def _ends(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(lengths).cumsum(0, dtype=torch.int32).to(device)


def groups(terms: Sequence[Term], like: Tensor) -> list[tuple[list[int], Group | None]]:
    """Terms by rank, as numbers in `terms`: with a group where there are several that the kernel can take."""
    by_rank: dict[int, list[int]] = {}
    for i, term in enumerate(terms):
        by_rank.setdefault(len(term.factors.a), []).append(i)
    found: list[tuple[list[int], Group | None]] = []
    for rank, numbers in by_rank.items():
        a, b_t = terms[numbers[0]].factors[:2]
        fits = len(numbers) > 1 and aligned(like.dtype, rank, a.shape[1], b_t.shape[1])
        found.append((numbers, Group([terms[i] for i in numbers], like.dtype, like.device) if fits else None))
    return found


def add_terms(y_TO: Tensor, x_TI: Tensor, terms: Sequence[Term]) -> list[Tensor]:
    """Add each term to its rows of `y_TO` in place, in the dtype of `x_TI`; returns their A xᵀ [R, t]."""
    return _project(x_TI, terms, y_TO)


def projections(x_TI: Tensor, terms: Sequence[Term]) -> list[Tensor]:
    """A xᵀ [R, t] of each term, in the dtype of `x_TI`."""
    return _project(x_TI, terms, None)


def _project(x_TI: Tensor, terms: Sequence[Term], y_TO: Tensor | None) -> list[Tensor]:
    projected: list[Tensor] = [x_TI] * len(terms)
    for numbers, group in groups(terms, x_TI):
        if group is None:
            own = [terms[i] for i in numbers]
            pieces = slices.projections(x_TI, own) if y_TO is None else slices.add_terms(y_TO, x_TI, own)
        else:
            low_tR = row_groups(group.take(x_TI), group.a_GRI.mT, group.ends)
            pieces = [piece.t() for piece in low_tR.split(group.lengths)]
            if y_TO is not None:
                group.add(y_TO, row_groups(low_tR, group.b_GRO, group.ends))
        for i, piece in zip(numbers, pieces, strict=True):
            projected[i] = piece
    return projected


def add_term_grads(
    g_TO: Tensor, x_TI: Tensor, projected: Iterable[Tensor], terms: Sequence[Term], dx_TI: Tensor | None
) -> None:
    """The backward of `add_terms`: adds to the gradients of A and B, and to `dx_TI` unless it is None."""
    low = list(projected)
    for numbers, group in groups(terms, x_TI):
        own = [terms[i] for i in numbers]
        if group is None:
            slices.add_term_grads(g_TO, x_TI, [low[i] for i in numbers], own, dx_TI)
            continue
        g_low_tR = row_groups(group.take(g_TO), group.b_GRO.mT, group.ends)
        for i, term, g_low_nR in zip(numbers, own, g_low_tR.split(group.lengths), strict=True):
            rows = slice(term.start, term.stop)
            slices.accumulate(term.factors.grad_b_t, low[i], g_TO[rows], term.scale)
            slices.accumulate(term.factors.grad_a, g_low_nR.t(), x_TI[rows], 1.0)
        if dx_TI is not None:
            group.add(dx_TI, row_groups(g_low_tR, group.a_GRI, group.ends))
