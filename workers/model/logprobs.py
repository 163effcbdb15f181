"""Log-probabilities of given targets, without ever holding the logits of more than a chunk of tokens.

Unembedding, its adapters, log-sum-exp and gather are one autograd node. Its backward recomputes a chunk's logits, and
only for tokens whose incoming gradient is not zero. If all tokens fit into one small chunk, the softmax is kept
instead.

Letters in shapes: T tokens, D hidden, V vocabulary, K targets per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workers.model.lora import LoraLinear, Routing, Term, add_term_grads, add_terms, anchor, projections


@dataclass(frozen=True, slots=True)
class Chunking:
    """Bounds on float32 logits, in elements: of one chunk, and of what is kept for the backward instead of
    recomputed.
    """

    chunk_elements: int = 1 << 24
    keep_elements: int = 1 << 22

    def rows(self, vocab_size: int) -> int:
        """Tokens per chunk."""
        return max(1, self.chunk_elements // vocab_size)


CPU_CHUNKING = Chunking()
CUDA_CHUNKING = Chunking(chunk_elements=1 << 28, keep_elements=1 << 27)


def target_logprobs(
    hidden_TD: Tensor, lm_head: LoraLinear, routing: Routing, targets: Tensor, chunking: Chunking | None = None
) -> Tensor:
    """log p(target) at temperature 1, float32, shaped like `targets` [T] or [T, K] (int64).

    `hidden_TD`: the unembedding's input, real tokens only. `routing`: over its T rows.
    """
    if chunking is None:
        chunking = CUDA_CHUNKING if hidden_TD.is_cuda else CPU_CHUNKING
    columns_TK = targets if targets.dim() == 2 else targets.unsqueeze(1)
    logprobs_TK: Tensor = _TargetLogprobs.apply(
        hidden_TD,
        anchor(hidden_TD.device),
        lm_head.weight,
        lm_head.bias,
        routing.terms(lm_head.path),
        columns_TK,
        chunking,
    )
    return logprobs_TK.view(targets.shape)


class _TargetLogprobs(torch.autograd.Function):
    """`anchor` is there only so that autograd comes back here when `hidden_TD` needs no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        anchor: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        terms: tuple[Term, ...],
        targets_TK: Tensor,
        chunking: Chunking,
    ) -> Tensor:
        total, vocab = len(hidden_TD), len(weight_VD)
        step = chunking.rows(vocab)
        keep = ctx.needs_input_grad[1] and total * vocab <= chunking.keep_elements
        exp_TV = hidden_TD.new_empty((total if keep else min(step, total), vocab), dtype=torch.float32)
        logprobs_TK = hidden_TD.new_empty(targets_TK.shape, dtype=torch.float32)
        lse_T1 = hidden_TD.new_empty((total, 1), dtype=torch.float32)
        max_T1 = torch.empty_like(lse_T1)
        for rows, here in _chunks(total, step, terms):
            logits_cV = exp_TV[rows] if keep else exp_TV[: rows.stop - rows.start]
            _logits(hidden_TD[rows], weight_VD, bias_V, here, out=logits_cV)
            torch.gather(logits_cV, 1, targets_TK[rows], out=logprobs_TK[rows])
            torch.amax(logits_cV, 1, keepdim=True, out=max_T1[rows])
            torch.sum(logits_cV.sub_(max_T1[rows]).exp_(), 1, keepdim=True, out=lse_T1[rows])
        lse_T1.log_().add_(max_T1)
        logprobs_TK.sub_(lse_T1)
        kept = (exp_TV, max_T1) if keep else ()
        ctx.save_for_backward(hidden_TD, targets_TK, lse_T1, *kept)
        ctx.weight, ctx.bias, ctx.terms, ctx.step = weight_VD, bias_V, terms, step
        return logprobs_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = (grads[0], *ctx.saved_tensors)
        total, terms = len(grads[0]), ctx.terms
        index = _rows_with_gradient(grads[0])
        if index is not None:
            tensors = tuple(tensor[index] for tensor in tensors)
            terms = _select_terms(terms, index)
        g_TK, hidden_TD, targets_TK, lse_T1, *kept = tensors
        minus_g_T1 = g_TK.sum(1, keepdim=True).neg_()
        if kept:
            minus_g_T1.mul_(torch.exp(kept[1] - lse_T1))
        dh_TD = torch.empty_like(hidden_TD)
        buffer_cV = None if kept else lse_T1.new_empty((min(ctx.step, len(hidden_TD)), len(ctx.weight)))
        for rows, here in _chunks(len(hidden_TD), ctx.step, terms):
            h_cD = hidden_TD[rows]
            if buffer_cV is None:
                d_cV, low = kept[0][rows], projections(h_cD, here)
            else:
                d_cV = buffer_cV[: len(h_cD)]
                low = _logits(h_cD, ctx.weight, ctx.bias, here, out=d_cV)
                d_cV.sub_(lse_T1[rows]).exp_()
            d_cV = d_cV.mul_(minus_g_T1[rows]).scatter_add_(1, targets_TK[rows], g_TK[rows]).to(h_cD.dtype)
            torch.mm(d_cV, ctx.weight, out=dh_TD[rows])
            add_term_grads(d_cV, h_cD, low, here, dh_TD[rows])
        if index is not None:
            dh_TD = dh_TD.new_zeros(total, dh_TD.shape[1]).index_copy_(0, index, dh_TD)
        return dh_TD, None, None, None, None, None, None


def _chunks(total: int, step: int, terms: tuple[Term, ...]) -> Iterator[tuple[slice, tuple[Term, ...]]]:
    """Slices of at most `step` rows, each with the terms that touch it, their rows counted from its start."""
    for start in range(0, total, step):
        stop = min(start + step, total)
        here = tuple(
            term._replace(start=max(term.start, start) - start, stop=min(term.stop, stop) - start)
            for term in terms
            if term.start < stop and term.stop > start
        )
        yield slice(start, stop), here


def _logits(
    hidden_cD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, terms: tuple[Term, ...], out: Tensor
) -> list[Tensor]:
    """Writes the logits [c, V] to `out`, float32; returns what the terms projected (see `add_terms`)."""
    same = out.dtype == hidden_cD.dtype
    logits_cV = torch.mm(hidden_cD, weight_VD.t(), out=out if same else None)
    if bias_V is not None:
        logits_cV.add_(bias_V)
    low = add_terms(logits_cV, hidden_cD, terms)
    if not same:
        out.copy_(logits_cV)
    return low


def _rows_with_gradient(g_TK: Tensor) -> Tensor | None:
    """The tokens whose gradient is not zero (NaN is not), ascending; None if that is all of them."""
    index = (g_TK != 0).any(1).nonzero().squeeze(1)
    return None if len(index) == len(g_TK) else index


def _select_terms(terms: tuple[Term, ...], index: Tensor) -> tuple[Term, ...]:
    """The terms over rows `index` only; adapters without a row there drop out."""
    bounds = torch.tensor([bound for term in terms for bound in (term.start, term.stop)], device=index.device)
    cuts = torch.searchsorted(index, bounds).tolist()
    selected = (t._replace(start=a, stop=b) for t, a, b in zip(terms, cuts[::2], cuts[1::2], strict=True))
    return tuple(term for term in selected if term.stop > term.start)
