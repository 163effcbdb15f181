"""Tiny models, an independent reference of what they compute, and short ways to ask the native engine for samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from app.wire.types import LoraConfig, SampleRequest, SampleResult
from tests.engine_suite.rig import Outcomes as Inbox
from tests.engine_suite.rig import ask, tokens_of
from workers.model.base import BaseModel
from workers.model.lora import Adapter
from workers.sample.engines.native import NativeEngine

__all__ = ["Inbox", "ask", "tokens_of"]

VOCAB = 97
CONTEXT = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def qwen() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SIZES))


def qwen_with_windows() -> PreTrainedModel:
    types = ["full_attention", "sliding_attention", "full_attention"]
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=5, layer_types=types))


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


@dataclass
class Lab:
    """A base model under test, and a plain copy of it that knows nothing of our layers."""

    base: BaseModel
    plain: PreTrainedModel

    @classmethod
    def of(cls, build: Callable[[], PreTrainedModel], seed: int = 0) -> Lab:
        torch.manual_seed(seed)
        model = build().eval()
        plain = copy.deepcopy(model)
        return cls(BaseModel(model, "tiny"), plain)

    def engine(self, **options: object) -> NativeEngine:
        return NativeEngine(self.base, **{"eos": (), **options})  # type: ignore[arg-type]

    def adapter(self, rank: int, seed: int, *, unembed: bool = True) -> Adapter:
        """Random weights in A and B, large enough to change what is sampled."""
        adapter = self.base.new_adapter(LoraConfig(rank=rank, seed=seed, train_unembed=unembed))
        generator = torch.Generator().manual_seed(seed)
        adapter.flat.normal_(0, 0.1, generator=generator)
        return adapter

    def merged(self, adapter: Adapter | None) -> PreTrainedModel:
        """A plain model whose weights include the adapter's: W + alpha/rank · B A."""
        model = copy.deepcopy(self.plain)
        if adapter is not None:
            for path, (a, b) in adapter.modules.items():
                weight = model.get_submodule(path).weight
                weight.data += adapter.config.alpha / adapter.config.rank * b.detach() @ a.detach()
        return model

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int], adapter: Adapter | None = None) -> torch.Tensor:
        """[len(tokens), V]: row i is the distribution after token i, by one full forward of the merged model."""
        logits = self.merged(adapter)(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), -1)

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int, adapter: Adapter | None = None) -> list[int]:
        """What transformers' own generate continues with."""
        tokens = torch.tensor([list(prompt)])
        out = self.merged(adapter).generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return out[0, len(prompt) :].tolist()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()


def drain(engine: NativeEngine) -> None:
    for _ in range(10_000):
        if not engine.step():
            return
    raise AssertionError("the engine never came to rest")


def serve(
    engine: NativeEngine, requests: Iterable[SampleRequest | tuple[SampleRequest, Adapter | None]]
) -> dict[str, SampleResult]:
    """Submit all at once; all have to succeed."""
    inbox = Inbox()
    for item in requests:
        request, adapter = item if isinstance(item, tuple) else (item, None)
        engine.submit(inbox.job(request, adapter))
    drain(engine)
    results = {}
    for name, outcome in inbox.items():
        if isinstance(outcome, Exception):
            raise outcome
        results[name] = outcome
    return results


def sample(engine: NativeEngine, request: SampleRequest, adapter: Adapter | None = None) -> SampleResult:
    return serve(engine, [(request, adapter)])[request.request_id]
