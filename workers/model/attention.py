"""Attention over packed sequences: the tokens of a micro-batch in one row, one sequence after the other, no padding.

Where sequences are padded instead, transformers' own attention does it. A packed row needs attention that keeps
sequences apart, which comes in three kinds:

- `flash`: a kernel for sequences of varying lengths, of the flash-attn package or, without it, torch's own. CUDA,
  16-bit numbers.
- `flex`: torch's compiled flex attention with a mask by blocks, which has sinks and caps on scores too. CUDA.
- `dense`: the model's own attention with a mask of T×T. It works anywhere and is slow; it is there for tests of the
  layout without a GPU.

They are functions under a name of ours in transformers' registries. Which one a call uses travels in a `ContextVar`; a
call without it (padded, or a sampling thread's) goes to the implementation that the model had. Not all models tell
transformers that positions start anew, so masks are cut at the sequences' ends here.

Letters in shapes: B sequences, T tokens of the row, H heads, C channels of a head.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    flex_attention_mask,
    packed_sequence_mask_function,
)

Kind = Literal["padded", "flash", "flex", "dense"]

PREFIX = "tinworks_"
"""Before the name of the implementation that a model had."""

FLASH_HEAD_DIM = 256
"""Most channels of a head that flash attention takes."""

Varlen = Callable[[Tensor, Tensor, Tensor, "Packing", float | None, int], Tensor]
"""(q, k, v [T, H, C], packing, scale, tokens in sight before a token's own or -1 for all) → [T, H, C]."""


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Where the sequences of a packed row are. `positions` [1, T]: each token's in its sequence; `sequences` [1, T]:
    the number of its sequence; `bounds` int32 [B + 1]: where they begin, and T; `longest`: tokens of the longest.
    """

    positions: Tensor
    sequences: Tensor
    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packing:
        """Of sequences of these lengths, in order."""
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        sequences = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        positions = torch.arange(len(sequences)) - bounds[sequences]
        return cls(
            positions.unsqueeze(0).to(device),
            sequences.unsqueeze(0).to(device),
            bounds.to(device, torch.int32),
            max(lengths),
        )


_packed: ContextVar[tuple[Kind, Packing] | None] = ContextVar("tinworks_packed", default=None)


@contextmanager
def packed(kind: Kind, packing: Packing) -> Iterator[None]:
    """Calls of the model inside this block, in this thread, attend in that way within the sequences of `packing`."""
    token = _packed.set((kind, packing))
    try:
        yield
    finally:
        _packed.reset(token)


def install(backbone: PreTrainedModel) -> None:
    """Let the model attend as `packed` says, and as it did outside of it. Call it once for a model."""
    own = backbone.config._attn_implementation
    AttentionInterface.register(PREFIX + own, _attention_beside(own))
    AttentionMaskInterface.register(PREFIX + own, _mask_beside(own))
    backbone.set_attn_implementation(PREFIX + own)


def _attention_beside(own: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attend(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        kind, packing = _packed.get() or ("padded", None)
        if kind == "flash":
            assert packing is not None
            return flash(query, key, value, packing, options), None
        if kind == "flex":
            result: tuple[Tensor, Tensor | None] = flex_attention_forward(
                module, query, key, value, attention_mask, **options
            )
            return result
        if own == "eager":
            plain = sys.modules[type(module).__module__].eager_attention_forward
        else:
            plain = AttentionInterface()[own]
        found: tuple[Tensor, Tensor | None] = plain(module, query, key, value, attention_mask, **options)
        return found

    return attend


def _mask_beside(own: str) -> Callable[..., Any]:
    def mask(*, mask_function: Callable[..., Any] = causal_mask_function, **options: Any) -> Any:
        kind, packing = _packed.get() or ("padded", None)
        if kind == "flash":
            return None
        if packing is not None:
            mask_function = and_masks(mask_function, packed_sequence_mask_function(packing.sequences))
            options["allow_is_causal_skip"] = False
        make = flex_attention_mask if kind == "flex" else AttentionMaskInterface()[own]
        return make(mask_function=mask_function, **options)

    return mask


def flash(
    query_1HTC: Tensor, key_1HTC: Tensor, value_1HTC: Tensor, packing: Packing, options: dict[str, Any]
) -> Tensor:
    """Causal attention within each sequence [1, T, H, C]. Of `options`, `scaling` and `sliding_window` count."""
    kernel = varlen_kernel()
    assert kernel is not None
    window = options.get("sliding_window")
    before = -1 if window is None else window - 1
    q_THC, k_THC, v_THC = (x[0].transpose(0, 1) for x in (query_1HTC, key_1HTC, value_1HTC))
    return kernel(q_THC, k_THC, v_THC, packing, options.get("scaling"), before).unsqueeze(0)


@lru_cache(1)
def varlen_kernel() -> Varlen | None:
    """What `flash` calls; None if neither the flash-attn package nor this torch has it."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return _torch_kernel()

    def packages(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None, before: int) -> Tensor:
        lengths = (packing.bounds, packing.bounds, packing.longest, packing.longest)
        out: Tensor = flash_attn_varlen_func(
            q, k, v, *lengths, softmax_scale=scale, causal=True, window_size=(before, 0)
        )
        return out

    return packages


def _torch_kernel() -> Varlen | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if not {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys():
        return None

    def torchs(q: Tensor, k: Tensor, v: Tensor, packing: Packing, scale: float | None, before: int) -> Tensor:
        lengths = (packing.bounds, packing.bounds, packing.longest, packing.longest)
        out = varlen_attn(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            *lengths,
            scale=scale,
            window_size=(before, 0),
            enable_gqa=q.shape[1] != k.shape[1],
        )
        assert isinstance(out, Tensor)
        return out

    return torchs


# -- what goes with what


def lacking(kind: Kind, device: torch.device, dtype: torch.dtype) -> str | None:
    """What this machine, or the model's dtype, lacks for a kind of attention."""
    if kind in ("flash", "flex") and device.type != "cuda":
        return "it needs CUDA"
    if kind == "flash" and dtype not in (torch.bfloat16, torch.float16):
        return f"it needs 16-bit numbers, the model is in {str(dtype).removeprefix('torch.')}"
    if kind == "flash" and varlen_kernel() is None:
        return "neither flash-attn is installed nor has this torch a kernel for it"
    return None


def unfit(kind: Kind, backbone: PreTrainedModel) -> str | None:
    """Why a model cannot attend in that way to a packed row."""
    config = backbone.config
    types = set(getattr(config, "layer_types", None) or ())
    if others := types - {"full_attention", "sliding_attention"}:
        return f"{min(others)} layers keep a state from one sequence to the next"
    if kind in ("padded", "dense"):
        return None
    if not getattr(backbone, "_supports_attention_backend", False):
        return "the model does not let others attend for it"
    if kind == "flex":
        return None if getattr(backbone, "_supports_flex_attn", False) else "the model does not know flex attention"
    if any(name.endswith(".sinks") for name, _ in backbone.named_parameters()):
        return "the kernel has no attention sinks"
    if getattr(config, "attn_logit_softcapping", None):
        return "the kernel does not cap scores"
    widths = {_width(config), getattr(config, "v_head_dim", None) or _width(config)}
    if len(widths) > 1 or max(widths) > FLASH_HEAD_DIM:
        return f"the kernel takes heads of up to {FLASH_HEAD_DIM} channels, keys and values alike"
    return None


def _width(config: Any) -> int:
    """Channels of a key of one head."""
    if latent := getattr(config, "qk_nope_head_dim", None):
        return int(latent + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
