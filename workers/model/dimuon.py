"""Dimuon of several runs at once: momentum, then a step along the orthogonal factor of each LoRA matrix.

The protocol names this optimizer and its hyperparameters but not its arithmetic; this is our reading of it
(SEMANTICS §5, docs/optimizers.md). For each matrix with gradient G:

    M ← β₁ M + (1 − β₁) G        W ← W − lr · msign(M)        msign(M) = U Vᵀ of the reduced SVD M = U Σ Vᵀ

Letters in shapes: N matrices, R rank, C columns, which are A's inputs or B's outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from app.wire.types import DimuonParams
from workers.model.adapter import Adapter
from workers.model.pieces import StepNorms, groups, sizes

RELATIVE_CUTOFF = 1e-7
"""Singular values up to this times the largest count as zero: they are rounding noise of float32 gradients."""


@dataclass(slots=True, eq=False)
class DimuonState:
    """Momentum of one run, float32 [P] like its adapter's `flat`, and the number of steps taken."""

    kind: ClassVar[str] = "dimuon"

    m: Tensor
    step: int = 0

    @classmethod
    def zeros(cls, adapter: Adapter) -> DimuonState:
        """The state before the first step."""
        return cls(torch.zeros_like(adapter.flat))

    def tensors(self) -> dict[str, Tensor]:
        """All of the state but the number of steps, as a snapshot keeps it: the tensors themselves."""
        return {"m": self.m}


@dataclass(frozen=True, slots=True, eq=False)
class _Matrix:
    """One LoRA matrix [R, C] of a run: views of its weights and its momentum."""

    learning_rate: float
    weights: Tensor
    momentum: Tensor


def dimuon_update(runs: Sequence[tuple[int, Adapter, DimuonState, DimuonParams]], norms: StepNorms) -> None:
    """Move each run's weights by its gradient, which is finite and clipped. The gradient's buffer is used up.

    The first of a run's four is what its norms are filed under.
    """
    for _, _, state, _ in runs:
        state.step += 1
    betas = [params.beta1 for _, _, _, params in runs]
    for owners, (grads, m, weights) in groups(
        [(adapter.grad_flat, state.m, adapter.flat) for _, adapter, state, _ in runs]
    ):
        torch._foreach_mul_(grads, [1 - betas[owner] for owner in owners])
        torch._foreach_mul_(m, [betas[owner] for owner in owners])
        torch._foreach_add_(m, grads)
        torch._foreach_copy_(grads, weights)
    for batch in _batches([matrix for run in runs for matrix in _matrices(*run[1:])]):
        directions_NRC = msign(torch.stack([matrix.momentum for matrix in batch]))
        rates = torch.tensor([matrix.learning_rate for matrix in batch], dtype=torch.float64)
        steps_NRC = directions_NRC.mul_(rates.to(directions_NRC.device).view(-1, 1, 1)).float()
        torch._foreach_sub_([matrix.weights for matrix in batch], steps_NRC.unbind())
    for owners, (before, weights) in groups([(adapter.grad_flat, adapter.flat) for _, adapter, _, _ in runs]):
        norms.add([runs[owner][0] for owner in owners], weights, before)


def msign(m_NRC: Tensor) -> Tensor:
    """The orthogonal factor of each matrix, float64 [N, R, C], zero where the matrix is.

    Its Frobenius norm is the square root of the numerical rank. The left singular vectors come from the Gram matrix
    [R, R]. The singular values are then measured as the lengths of the rows of Uᵀ M, so that every direction down to
    the cutoff gets the length one; the roots of the Gram matrix's eigenvalues are off by up to a percent there.
    """
    x_NRC = m_NRC.double()
    columns = x_NRC.shape[-1]
    if columns % 8:  # every matrix begins at a cache line, since MKL's products depend on how operands are aligned
        x_NRC = F.pad(x_NRC, (0, -columns % 8))
    _, u_NRR = torch.linalg.eigh(x_NRC @ x_NRC.mT)
    rows_NRC = u_NRR.mT @ x_NRC
    sizes_NR1 = torch.linalg.vector_norm(rows_NRC, dim=-1, keepdim=True)
    kept_NR1 = sizes_NR1 > RELATIVE_CUTOFF * sizes_NR1.amax(dim=1, keepdim=True)
    rows_NRC *= torch.where(kept_NR1, 1 / sizes_NR1, 0.0)
    directions_NRC: Tensor = (u_NRR @ rows_NRC)[..., :columns]
    return directions_NRC


def _matrices(adapter: Adapter, state: DimuonState, params: DimuonParams) -> Iterator[_Matrix]:
    """Each matrix of a run: A and B of each module, and of each expert where a module has experts [E, R, C]."""
    for factors in adapter.factors.values():
        for view in (factors.a, factors.b_t):
            start = view.storage_offset() - adapter.flat.storage_offset()
            momentum = state.m[start : start + view.numel()].view_as(view)
            for weights, own in zip(_each(view), _each(momentum), strict=True):
                yield _Matrix(params.learning_rate, weights, own)


def _each(view: Tensor) -> Sequence[Tensor]:
    return view.view(-1, *view.shape[-2:]).unbind()


def _batches(matrices: Sequence[_Matrix]) -> Iterator[list[_Matrix]]:
    """Matrices of one shape, as many together as a group may hold; at least one."""
    by_shape: dict[torch.Size, list[_Matrix]] = {}
    for matrix in matrices:
        by_shape.setdefault(matrix.weights.shape, []).append(matrix)
    for shape, alike in by_shape.items():
        count = max(1, sizes(alike[0].weights.device).group // shape.numel())
        for start in range(0, len(alike), count):
            yield alike[start : start + count]
