"""How vLLM is started: from the worker's settings and from what is known of the model."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from app.settings import Settings

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The bounds that vLLM has for the rank of its adapters."""

WHOLE_TOKENS = 4096
"""Tokens of one step on a CPU, or as many as the longest prompt has."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """`source`: a folder or hub name. `dtype`: torch's name of it. `context_length`: tokens of prompt and sample.

    `slots`: adapters in one batch. `cpu_adapters`: adapters in memory beside them, at least as many. `max_rank`: one of
    `ADAPTER_RANKS`. `max_rows`: sequences at a time. `memory_share`: of the device's memory; `cache_bytes`: of keys and
    values, 0: what is left of the share. `stalled_s`: a vLLM that answers nothing for so long is taken for dead.
    """

    source: str
    dtype: str
    context_length: int
    slots: int = 8
    cpu_adapters: int = 64
    max_rank: int = 128
    max_rows: int = 256
    tensor_parallel: int = 1
    data_parallel: int = 1
    memory_share: float = 0.9
    cache_bytes: int = 0
    eager: bool = False
    stalled_s: float = 600.0

    @classmethod
    def of(cls, settings: Settings, *, source: str, dtype: str, context_length: int) -> VllmOptions:
        """Raises ValueError, naming the setting, if they do not go together."""
        longest = settings.vllm_max_model_len or context_length
        if longest > context_length:
            raise ValueError(f"TINWORKS_VLLM_MAX_MODEL_LEN is {longest}, this model's context has {context_length}")
        if settings.vllm_max_cpu_loras and settings.vllm_max_cpu_loras < settings.vllm_max_loras:
            raise ValueError("TINWORKS_VLLM_MAX_CPU_LORAS must not be less than TINWORKS_VLLM_MAX_LORAS")
        return cls(
            source,
            dtype,
            longest,
            slots=settings.vllm_max_loras,
            cpu_adapters=settings.vllm_max_cpu_loras or max(settings.adapter_cache, settings.vllm_max_loras),
            max_rank=rank_bound(settings.vllm_max_lora_rank or settings.max_lora_rank),
            max_rows=settings.max_running_sequences,
            tensor_parallel=settings.vllm_tensor_parallel_size,
            data_parallel=settings.vllm_data_parallel_size,
            memory_share=settings.vllm_gpu_memory_utilization,
            cache_bytes=settings.vllm_kv_cache_bytes,
            eager=settings.vllm_enforce_eager,
            stalled_s=settings.max_pass_s,
        )

    def arguments(self) -> dict[str, Any]:
        """Those of `AsyncEngineArgs`.

        vLLM's own random numbers decide all tokens of requests without a seed, and its own default is the same for
        every start. Adapters of experts come as PEFT writes them for stacks (`is_3d_lora_weight` of their requests);
        those vLLM takes for every mixture of experts only in its mixed format. On a CPU prompts go through whole: there
        vLLM (0.32) dies of a request with a seed whose prompt it has cut.
        """
        from vllm.platforms import current_platform

        whole: dict[str, Any] = {}
        if current_platform.is_cpu():
            most = max(WHOLE_TOKENS, self.context_length, self.max_rows)
            whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": most}
        return whole | {
            "model": self.source,
            "dtype": self.dtype,
            "max_model_len": self.context_length,
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "enable_prefix_caching": True,
            "enable_lora": True,
            "max_loras": self.slots,
            "max_cpu_loras": self.cpu_adapters,
            "max_lora_rank": self.max_rank,
            "enable_mixed_moe_lora_format": True,
            "max_num_seqs": self.max_rows,
            "max_logprobs": 1 << 30,
            "logprobs_mode": "raw_logprobs",
            "tensor_parallel_size": self.tensor_parallel,
            "data_parallel_size": self.data_parallel,
            "gpu_memory_utilization": self.memory_share,
            "kv_cache_memory_bytes": self.cache_bytes or None,
            "enforce_eager": self.eager,
            "seed": secrets.randbits(31),
            "disable_log_stats": True,
            "enable_log_requests": False,
        }


def rank_bound(rank: int) -> int:
    """The least bound that lets adapters of `rank` in. Raises ValueError if there is none."""
    for bound in ADAPTER_RANKS:
        if rank <= bound:
            return bound
    raise ValueError(f"TINWORKS_VLLM_MAX_LORA_RANK: vLLM serves adapters up to rank {ADAPTER_RANKS[-1]}, not {rank}")
