"""A tiny model of the suite's own, and adapters of it as PEFT writes them."""

from __future__ import annotations

import copy
import itertools
import string
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import peft
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB = 2048
CONTEXT = 256
END_OF_SEQUENCE = "<end>"

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ALPHA = 32


def make_model(folder: Path) -> Qwen3ForCausalLM:
    """Write a random Qwen3 in float32, with a tied unembedding, and its tokenizer to `folder`; returns the model.

    Its end of sequence is a token that the greedy continuation of `prompt(6)` comes to after a while.
    """
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen3ForCausalLM(config).eval()
    continuation = greedy(model, prompt(6), 30)
    eos_token = continuation[first_of_its_kind(continuation)]
    model.generation_config.eos_token_id = model.config.eos_token_id = eos_token
    model.save_pretrained(folder)
    make_tokenizer(eos_token).save_pretrained(folder)
    return model


def make_tokenizer(eos_token: int) -> PreTrainedTokenizerFast:
    """Every token is a piece of text of its own: three letters."""
    triples = itertools.product(string.ascii_lowercase, repeat=3)
    pieces = ["".join(letters) for letters in itertools.islice(triples, VOCAB)]
    pieces[eos_token] = END_OF_SEQUENCE
    tokenizer = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token=pieces[0]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_SEQUENCE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()


@torch.no_grad()
def greedy(model: torch.nn.Module, tokens: Sequence[int], count: int) -> list[int]:
    """What transformers' own generate continues with, whatever ends the model's sequences."""
    inputs = torch.tensor([list(tokens)])
    out = model.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=VOCAB,
        pad_token_id=0,
    )
    return out[0, len(tokens) :].tolist()


def first_of_its_kind(tokens: Sequence[int], at_least: int = 4) -> int:
    """The first index from `at_least` on of a token that did not occur before."""
    return next(i for i in range(at_least, len(tokens)) if tokens[i] not in tokens[:i])


def make_adapter(model: PreTrainedModel, folder: Path, *, rank: int, targets: Sequence[str], seed: int) -> None:
    """Write an adapter of `model` with random A and B, large enough to change what is sampled, as PEFT does."""
    config = peft.LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=list(targets), task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(copy.deepcopy(model), config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if ".lora_" in name:
            size = 0.1 if "lora_A" in name else 0.1 * rank**0.5 / (ALPHA / rank) ** 0.5
            parameter.data.normal_(0, size, generator=generator)
    wrapped.save_pretrained(folder, save_embedding_layers=False)
