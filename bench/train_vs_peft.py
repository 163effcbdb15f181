"""Forward and backward of one LoRA adapter: plain transformers + PEFT against our `run_pass`, in one process.

    python bench/train_vs_peft.py [--threads 1] [--pairs 30] [--experts 0]

A Qwen3 of a million parameters, 8 sequences of 64 tokens, rank 8 on all linear layers and the unembedding,
cross-entropy. With `--experts N`, a Qwen3-MoE of N experts per layer, four of them for each token. The two alternate;
printed are the median of each and how many times as fast ours is, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import copy

import torch
from loops import check_same_loss, datums, our_step, peft_step, with_peft
from pairs import timed
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from app.wire.types import LoraConfig
from workers.model.base import BaseModel
from workers.model.tiny import make_model, make_tokenizer

SEQUENCES, TOKENS, RANK = 8, 64, 8


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
    data = datums([TOKENS] * SEQUENCES, model.config.vocab_size)
    base = BaseModel(copy.deepcopy(model), "tiny")
    ours = our_step(base, [(base.new_adapter(LoraConfig(rank=RANK, seed=0)), data)])
    theirs = peft_step(with_peft(copy.deepcopy(model), RANK), data)
    check_same_loss(ours, theirs)
    found = timed(ours, theirs, arguments.pairs)
    print(f"threads={arguments.threads} sequences={SEQUENCES}x{TOKENS} rank={RANK} experts={arguments.experts}")
    print(f"peft={found.theirs:.2f}ms  tinworks={found.ours:.2f}ms  speed={found}")


if __name__ == "__main__":
    main()
