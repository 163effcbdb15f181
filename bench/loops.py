"""The two sides of the training benchmarks: the usual loop of transformers and PEFT, and `run_pass`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import peft
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeForCausalLM

from app.wire.types import Datum
from workers.model.adapter import Adapter
from workers.model.base import BaseModel
from workers.model.forward import Work, run_pass
from workers.model.preparation import Preparation, prepare
from workers.model.tiny import make_model, make_tokenizer

ATTENTION_AND_HEAD = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
MLP = ["gate_proj", "up_proj", "down_proj"]
MICRO_BATCH_TOKENS = 4096
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def model_of(folder: Path | None) -> PreTrainedModel:
    """The model in a folder, in float32; without one the tiny model."""
    if folder is None:
        return make_model(make_tokenizer())
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def datums(lengths: Sequence[int], vocab_size: int, *, unweighted: float = 0.0, seed: int = 0) -> list[Datum]:
    """Random datums for cross-entropy. Of each, the first tokens have weight 0, in that share: a prompt."""
    draw = np.random.default_rng(seed)
    made = []
    for n in lengths:
        stream = draw.integers(0, vocab_size, n + 1)
        weights = (np.arange(n) >= unweighted * n).astype(np.float32)
        made.append(Datum(stream[:-1].astype(np.int32), {"target_tokens": stream[1:].copy(), "weights": weights}))
    return made


def padded(data: Sequence[Datum]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tokens, targets and weights [B, L], and the mask of real tokens if there are others."""
    longest = max(len(datum.tokens) for datum in data)
    tokens, targets = np.zeros((2, len(data), longest), np.int64)
    weights = np.zeros((len(data), longest), np.float32)
    mask = np.zeros((len(data), longest), np.int64)
    for i, datum in enumerate(data):
        n = len(datum.tokens)
        tokens[i, :n], targets[i, :n] = datum.tokens, datum.inputs["target_tokens"]
        weights[i, :n], mask[i, :n] = datum.inputs["weights"], 1
    arrays = [torch.from_numpy(array) for array in (tokens, targets, weights)]
    return arrays[0], arrays[1], arrays[2], None if mask.all() else torch.from_numpy(mask)


def with_peft(model: PreTrainedModel, rank: int) -> peft.PeftModel:
    """The model with an adapter on all layers that ours train."""
    dense = not isinstance(model, Qwen3MoeForCausalLM)
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=32,
        target_modules=ATTENTION_AND_HEAD + (MLP if dense else []),
        target_parameters=None if dense else STACKS,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(model, config)


def peft_step(wrapped: peft.PeftModel, data: Sequence[Datum], *, batch: int | None = None) -> Callable[[], float]:
    """Logits, log-softmax, gather, weighted sum, backward, `batch` sequences at a time; returns the loss."""
    size = batch or len(data)

    def step() -> float:
        wrapped.zero_grad(set_to_none=False)
        total = 0.0
        for start in range(0, len(data), size):
            tokens, targets, weights, mask = padded(data[start : start + size])
            logits = wrapped(input_ids=tokens, attention_mask=mask, use_cache=False).logits
            logprobs = torch.log_softmax(logits.float(), -1)
            picked = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
            loss = -(picked * weights).sum()
            loss.backward()
            picked.detach().numpy()
            total += float(loss.detach())
        return total

    return step


def our_base(model: PreTrainedModel) -> tuple[BaseModel, int]:
    """The model as a train worker prepares it on a CPU, and how many tokens its micro-batches have."""
    base = BaseModel(model, "bench")
    return base, min(MICRO_BATCH_TOKENS, prepare(base, Preparation("padded")) or MICRO_BATCH_TOKENS)


def our_step(
    base: BaseModel, runs: Sequence[tuple[Adapter, Sequence[Datum]]], *, micro_batch_tokens: int = MICRO_BATCH_TOKENS
) -> Callable[[], float]:
    """One pass of all runs, from arrays to arrays; returns the sum of their losses."""

    def step() -> float:
        for adapter, _ in runs:
            adapter.zero_grad()
        works = [Work(adapter, data, "cross_entropy") for adapter, data in runs]
        total = 0.0
        for output in run_pass(base, works, micro_batch_tokens=micro_batch_tokens):
            assert not isinstance(output, Exception), output
            total += output.metrics["loss:sum"]
        return total

    return step


def check_same_loss(ours: Callable[[], float], theirs: Callable[[], float]) -> None:
    """Fresh adapters on both sides add nothing, so both have the base model's loss."""
    mine, other = ours(), theirs()
    assert abs(mine - other) < 1e-4 * abs(other), (mine, other)
