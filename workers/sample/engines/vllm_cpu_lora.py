"""LoRA on vLLM's CPU backend, one slot after the other.

vLLM's own kernels for CPUs gather each row's weights by the number of its slot. Rows of the base model have the number
-1, which picks the last slot: they get whatever adapter is there. And the gathered weights, one copy per row, take more
time and memory than the products. Here the rows of a slot are multiplied together, and those of none are left alone.

Letters in shapes: T rows, S slots, R rank, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

Rows = slice | Tensor


def install() -> None:
    """Let vLLM take this implementation on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    path = f"{__name__}.punica_wrapper"
    CpuPlatform.get_punica_wrapper = classmethod(lambda cls: path)


@lru_cache(maxsize=1)
def _wrapper_class() -> type:
    """vLLM's class with products of our own."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    class SlotwiseLora(PunicaWrapperCPU):
        """See `PunicaWrapperBase`; the arguments are its own."""

        def update_metadata(self, *args: Any, **kwargs: Any) -> None:
            super().update_metadata(*args, **kwargs)
            self._by_slot: dict[tuple[bool, int], list[tuple[int, Rows]]] = {}

        def _rows(self, count: int, *, unembed: bool = False) -> list[tuple[int, Rows]]:
            """The slots in use among the first `count` rows, with the rows of each."""
            known = self._by_slot.get((unembed, count))
            if known is None:
                slots = self.sampler_indices if unembed else self.token_lora_indices
                known = self._by_slot[unembed, count] = rows_of_slots(slots[:count])
            return known

        def add_shrink(
            self, y: Sequence[Tensor], x: Tensor, lora_a_stacked: Sequence[Tensor], scale: float, **kwargs: Any
        ) -> None:
            x_TI = x.view(-1, x.shape[-1])
            for slot, rows in self._rows(len(x_TI)):
                for out, stacked in zip(y, lora_a_stacked, strict=True):
                    shrink(out.view(-1, out.shape[-1]), x_TI, stacked, slot, rows, scale)

        def add_expand(
            self,
            y: Tensor,
            x: Sequence[Tensor],
            lora_b_stacked: Sequence[Tensor],
            output_slices: Sequence[int],
            offset_start: int = 0,
            add_inputs: bool = True,
            **kwargs: Any,
        ) -> None:
            y_TO = y.view(-1, y.shape[-1])
            for slot, rows in self._rows(len(y_TO)):
                offset = offset_start
                for part, stacked, width in zip(x, lora_b_stacked, output_slices, strict=True):
                    expand(y_TO, part.view(-1, part.shape[-1]), stacked, slot, rows, offset, width, add_inputs)
                    offset += width

        def add_lora_embedding(
            self, y: Tensor, x: Tensor, lora_b_stacked: Tensor, add_inputs: bool = True, **kwargs: Any
        ) -> None:
            for slot, rows in self._rows(len(y)):
                expand(y, x, lora_b_stacked, slot, rows, 0, y.shape[-1], add_inputs)

        def add_lora_logits(
            self, y: Tensor, x: Tensor, lora_a_stacked: Tensor, lora_b_stacked: Tensor, scale: float, **kwargs: Any
        ) -> None:
            y_TO, x_TI = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
            for slot, rows in self._rows(len(x_TI), unembed=True):
                low_TR = (x_TI[rows].float() @ lora_a_stacked[slot].flatten(0, -2).float().T) * scale
                delta_TO = low_TR @ lora_b_stacked[slot].flatten(0, -2).float().T
                width = min(y_TO.shape[1], delta_TO.shape[1])
                y_TO[rows, :width] += delta_TO[:, :width].to(y.dtype)

    return SlotwiseLora


def punica_wrapper(*args: Any, **kwargs: Any) -> Any:
    """An instance, for vLLM, which looks this name up and calls it."""
    return _wrapper_class()(*args, **kwargs)


def rows_of_slots(slots_T: Tensor) -> list[tuple[int, Rows]]:
    """Each slot that occurs, but -1, and its rows: a slice where they lie side by side."""
    found: list[tuple[int, Rows]] = []
    for slot in slots_T.unique().tolist():
        if slot < 0:
            continue
        rows = (slots_T == slot).nonzero().squeeze(1)
        first, last = int(rows[0]), int(rows[-1])
        found.append((slot, slice(first, last + 1) if last - first + 1 == len(rows) else rows))
    return found


def shrink(y_TR: Tensor, x_TI: Tensor, stacked: Tensor, slot: int, rows: Rows, scale: float) -> None:
    """y = scale · x Aᵀ for the rows of a slot. `stacked` [S, 1, R, I] or [S, R, I]; y may be wider than R."""
    a_RI = stacked[slot].flatten(0, -2).to(y_TR.dtype)
    y_TR[rows, : len(a_RI)] = scale * (x_TI[rows].to(y_TR.dtype) @ a_RI.T)


def expand(
    y_TO: Tensor, x_TR: Tensor, stacked: Tensor, slot: int, rows: Rows, offset: int, width: int, add: bool
) -> None:
    """y[:, offset : offset+width] (+)= x Bᵀ for the rows of a slot. `stacked` [S, 1, O, R] or [S, O, R]."""
    b_OR = stacked[slot].flatten(0, -2).to(y_TO.dtype)
    delta_TO = x_TR[rows].to(y_TO.dtype) @ b_OR.T
    width = min(width, delta_TO.shape[1], y_TO.shape[1] - offset)
    if add:
        y_TO[rows, offset : offset + width] += delta_TO[:, :width]
    else:
        y_TO[rows, offset : offset + width] = delta_TO[:, :width]
