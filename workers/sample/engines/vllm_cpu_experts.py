"""Mixtures of experts with LoRA on vLLM's CPU backend, expert by expert.

For layers of experts that have adapters vLLM has kernels for GPUs only. This one is plain torch, and takes what those
take: the stacks of all slots, as vLLM has read them from the adapters' files. Weights without quantization, one rank.

Letters in shapes: T rows, K choices per row, E experts, S slots, R rank, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from workers.sample.engines.vllm_cpu_lora import Rows, rows_of_slots


def install() -> None:
    """Let vLLM take this implementation on CPUs, for models that it loads with adapters."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as methods
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    select = methods.select_unquantized_moe_backend

    def select_for_adapters(moe_config: Any) -> Any:
        if not moe_config.is_lora_enabled:
            return select(moe_config)
        return UnquantizedMoeBackend.CPU, _experts_class()

    methods.select_unquantized_moe_backend = select_for_adapters


@lru_cache(maxsize=1)
def _experts_class() -> type:
    """vLLM's class for CPUs with products of our own."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin

    class ExpertsWithLora(LoRAExpertsMixin, CPUUnquantizedExperts):
        """See `FusedMoEExpertsModular`; the arguments are its own."""

        @staticmethod
        def _supports_activation(activation: MoEActivation) -> bool:
            return bool(activation == MoEActivation.SILU)

        @staticmethod
        def _supports_parallel_config(moe_parallel_config: Any) -> bool:
            return not bool(moe_parallel_config.use_ep)

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            """The stacks stay as they were read: w1 [E, 2·I, H], w2 [E, H, I]."""

        def apply(
            self,
            output: Tensor,
            hidden_states: Tensor,
            w1: Tensor,
            w2: Tensor,
            topk_weights: Tensor,
            topk_ids: Tensor,
            activation: MoEActivation,
            global_num_experts: int,
            expert_map: Tensor | None,
            a1q_scale: Tensor | None,
            a2_scale: Tensor | None,
            workspace13: Tensor,
            workspace2: Tensor,
            expert_tokens_meta: Any,
            apply_router_weight_on_input: bool,
        ) -> None:
            if activation != MoEActivation.SILU:
                raise NotImplementedError(f"adapters on experts with {activation} run on GPUs only")
            lora = self._lora_context
            slots_T = None if lora is None else lora.punica_wrapper.token_lora_indices[: len(hidden_states)]
            output.zero_()
            for expert, rows, choices in rows_of_experts(topk_ids):
                slots = [] if slots_T is None else rows_of_slots(slots_T[rows])
                x_TH = hidden_states[rows]
                y_TI = functional.linear(x_TH, w1[expert], _of(self.w1_bias, expert))
                for slot, own in slots:
                    add(y_TI, x_TH, lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, slot, expert, own)
                gate_TI, up_TI = y_TI.chunk(2, -1)
                x_TI = functional.silu(gate_TI) * up_TI
                y_TH = functional.linear(x_TI, w2[expert], _of(self.w2_bias, expert))
                for slot, own in slots:
                    add(y_TH, x_TI, lora.w2_lora_a_stacked, lora.w2_lora_b_stacked, slot, expert, own)
                if not apply_router_weight_on_input:
                    y_TH = y_TH * topk_weights[rows, choices].unsqueeze(1)
                output.index_add_(0, rows, y_TH.to(output.dtype))

    return ExpertsWithLora


def rows_of_experts(topk_ids_TK: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each expert that was chosen, its rows, and which of the row's choices it was."""
    for expert in topk_ids_TK.unique().tolist():
        rows, choices = (topk_ids_TK == expert).nonzero(as_tuple=True)
        yield expert, rows, choices


def add(y: Tensor, x: Tensor, a: tuple[Tensor, ...], b: tuple[Tensor, ...], slot: int, expert: int, rows: Rows) -> None:
    """y += x Aᵀ Bᵀ for the rows of a slot. `a` [S, E, R, in] and `b` [S, E, out, R]: one of each for every part of y,
    side by side."""
    start = 0
    for stacked_a, stacked_b in zip(a, b, strict=True):
        delta = (x[rows] @ stacked_a[slot, expert].to(x.dtype).T) @ stacked_b[slot, expert].to(x.dtype).T
        y[rows, start : start + delta.shape[1]] += delta
        start += delta.shape[1]


def _of(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
