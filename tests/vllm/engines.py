"""How tests start a vLLM engine on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from workers.model.base import BaseModel
from workers.sample.engines.vllm import VllmEngine, end_process
from workers.sample.engines.vllm_options import VllmOptions

CACHE_BYTES = 1 << 28


def start(folder: Path, *, on_death: Callable[[], None] = end_process, **options: Any) -> VllmEngine:
    """An engine that serves the model in a folder in float32, with adapters up to rank 8, four of them in a batch."""
    outline = BaseModel.outline(folder, dtype=torch.float32)

    def decode(tokens: Sequence[int]) -> str:
        return str(outline.tokenizer().decode(list(tokens)))

    wanted: dict[str, Any] = {
        "max_rank": 8,
        "slots": 4,
        "cpu_adapters": 8,
        "cache_bytes": CACHE_BYTES,
        "eager": True,
        **options,
    }
    vllm = VllmOptions(str(folder), "float32", outline.facts.context_length, **wanted)
    return VllmEngine(outline, vllm, decode=decode, on_death=on_death)
