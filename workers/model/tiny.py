"""A tiny chat model, made on the spot: `python -m workers.model.tiny --out DIR`.

For tests, demos and a first look without a download: a random Qwen3 of a million parameters and a byte-level BPE
tokenizer trained on Python's own help texts. It is the same model on every machine, and it knows nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

VOCAB_SIZE = 2048
CONTEXT_LENGTH = 2048
SEED = 20240917
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML."""


def make_tiny_model(out: Path) -> None:
    """Write model, tokenizer and generation config to the folder `out`, all at once. Does nothing if `out` is there."""
    if out.exists():
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        tokenizer = make_tokenizer()
        tokenizer.save_pretrained(temporary)
        make_model(tokenizer).save_pretrained(temporary)
        name_tokenizer_class(temporary / "tokenizer_config.json")
        temporary.chmod(0o755)
        for file in temporary.iterdir():
            file.chmod(0o644)
        os.rename(temporary, out)
    except OSError:
        if not out.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """The model, with random weights that depend on `SEED` alone."""
    ids = tokenizer.get_vocab()
    end_of_text, turn_end = ids[END_OF_TEXT], ids[TURN_END]
    config = Qwen3Config(
        hidden_size=128,
        num_hidden_layers=4,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=CONTEXT_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=turn_end,
        pad_token_id=end_of_text,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [turn_end, end_of_text]
    model.generation_config.pad_token_id = end_of_text
    return model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with the three special tokens of ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in (END_OF_TEXT, TURN_START, TURN_END)]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LENGTH,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def name_tokenizer_class(path: Path) -> None:
    """Give the tokenizer's class the name that every version of transformers knows it by."""
    config = json.loads(path.read_text())
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def training_text() -> Iterator[str]:
    """Python's help topics, and small talk about arithmetic and everyday things."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]
    draw = random.Random(SEED)
    things = ["apples", "books", "cats", "days", "friends", "games", "houses", "ideas", "keys", "letters", "rivers"]
    for _ in range(4000):
        a, b, thing = draw.randrange(100), draw.randrange(100), draw.choice(things)
        more = "You" if b > a else "I"
        question, answer = draw.choice(
            [
                (f"What is {a} + {b}?", f"{a} + {b} = {a + b}. The answer is {a + b}."),
                (f"I have {a} {thing} and you have {b}. Who has more?", f"{more} do, I think."),
                (f"Please tell me about {thing}.", f"Sure! Here is what I know about {thing}: there are {a} of them."),
                ("Hello, how are you?", f"I am fine, thank you. Would you like some {thing}?"),
            ]
        )
        yield f"system\nYou are a helpful assistant.\nuser\n{question}\nassistant\n{answer}\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to make")
    logging.disable_progress_bar()
    make_tiny_model(parser.parse_args().out)


if __name__ == "__main__":
    main()
