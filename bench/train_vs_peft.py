"""Forward and backward of one LoRA adapter: plain transformers + PEFT against our `run_pass`, in one process.

    python bench/train_vs_peft.py [--threads 1] [--pairs 30] [--experts 0]

A Qwen3 of a million parameters, 8 sequences of 64 tokens, rank 8 on all linear layers and the unembedding,
cross-entropy. With `--experts N`, a Qwen3-MoE of N experts per layer, four of them for each token. The two alternate,
and the median of each is printed with their ratio: below 1 we are faster.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable

import numpy as np
import peft
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from app.wire.types import Datum, LoraConfig
from workers.model.base import BaseModel
from workers.model.forward import Work, run_pass
from workers.model.tiny import make_model, make_tokenizer

SEQUENCES, TOKENS, RANK = 8, 64, 8
ATTENTION_AND_HEAD = ["q_proj", "k_proj", "v_proj", "o_proj", "lm_head"]
MLP = ["gate_proj", "up_proj", "down_proj"]
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


def mixture_of_experts(num_experts: int) -> PreTrainedModel:
    """A random Qwen3-MoE as wide as the tiny model."""
    config = Qwen3MoeConfig(
        hidden_size=128,
        num_hidden_layers=4,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=num_experts,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
        vocab_size=2048,
    )
    return Qwen3MoeForCausalLM(config)


def peft_step(model: PreTrainedModel, tokens: np.ndarray, targets: np.ndarray) -> Callable[[], float]:
    """The usual loop: logits, log-softmax, gather, sum, backward; returns the loss."""
    dense = not isinstance(model, Qwen3MoeForCausalLM)
    config = peft.LoraConfig(
        r=RANK,
        lora_alpha=32,
        target_modules=ATTENTION_AND_HEAD + (MLP if dense else []),
        target_parameters=None if dense else STACKS,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )
    wrapped = peft.get_peft_model(model, config)

    def step() -> float:
        wrapped.zero_grad(set_to_none=False)
        logits = wrapped(input_ids=torch.from_numpy(tokens), use_cache=False).logits
        logprobs = torch.log_softmax(logits.float(), -1)
        picked = logprobs.gather(-1, torch.from_numpy(targets).unsqueeze(-1)).squeeze(-1)
        loss = -picked.sum()
        loss.backward()
        picked.detach().numpy()
        return float(loss.detach())

    return step


def our_step(model: PreTrainedModel, tokens: np.ndarray, targets: np.ndarray) -> Callable[[], float]:
    """The same through `run_pass`, from arrays to arrays."""
    base = BaseModel(model, "tiny")
    adapter = base.new_adapter(LoraConfig(rank=RANK, seed=0))
    weights = np.ones(TOKENS, np.float32)

    def step() -> float:
        adapter.zero_grad()
        data = [Datum(t, {"target_tokens": y, "weights": weights}) for t, y in zip(tokens, targets, strict=True)]
        (output,) = run_pass(base, [Work(adapter, data, "cross_entropy")], micro_batch_tokens=4096)
        assert not isinstance(output, Exception), output
        return output.metrics["loss:sum"]

    return step


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--experts", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model: PreTrainedModel = make_model(make_tokenizer())
    if arguments.experts:
        model = mixture_of_experts(arguments.experts)
    stream = np.random.default_rng(0).integers(0, model.config.vocab_size, (SEQUENCES, TOKENS + 1))
    tokens, targets = stream[:, :-1].copy(), stream[:, 1:].copy()
    steps = {
        "peft": peft_step(copy.deepcopy(model), tokens, targets),
        "tinworks": our_step(copy.deepcopy(model), tokens, targets),
    }
    losses = {name: step() for name, step in steps.items()}
    assert abs(losses["peft"] - losses["tinworks"]) < 1e-4 * losses["peft"], losses
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(3 + arguments.pairs):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - start))
    medians = {name: statistics.median(values[3:]) for name, values in times.items()}
    ratio = medians["tinworks"] / medians["peft"]
    print(f"threads={arguments.threads} sequences={SEQUENCES}x{TOKENS} rank={RANK} experts={arguments.experts}")
    print("  ".join(f"{name}={value:.2f}ms" for name, value in medians.items()) + f"  tinworks/peft={ratio:.3f}")


if __name__ == "__main__":
    main()
