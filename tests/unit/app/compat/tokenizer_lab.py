"""Small tokenizers of the kinds that models have: bytes as characters, and words with a fallback to bytes."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from app.compat.tokenizer import ModelTokenizer
from workers.model.tokenizer import pack_tokenizer

SPECIAL = ("<|end|>", "<|turn|>", "<|begin|>")
END = 0
_TEXTS = [
    "Hello there, how are you today? I am fine, thank you.",
    "naïve café, Ärger und Öl, ça va, niño",
    "你好世界,天地玄黄宇宙洪荒 🎉🎈 👩‍🚀 здравствуй мир",
    "user assistant system tool <tool_call> </tool_call> {\"name\": \"x\", \"arguments\": {}}",
] * 4  # fmt: skip


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return tokenizer


def _byte_fallback() -> Tokenizer:
    """As Llama 2 has it: spaces are part of the words after them, unknown characters are bytes."""
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helotrwyHuai,.?", "▁h", "▁he", "ll", "▁hell"]
    merges = [("▁", "h"), ("▁h", "e"), ("l", "l"), ("▁he", "ll")]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


@lru_cache
def hugging_face(kind: str) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers has it."""
    backend = _byte_level() if kind == "byte_level" else _byte_fallback()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=SPECIAL[END],
        bos_token=SPECIAL[2],
        clean_up_tokenization_spaces=False,
    )


@lru_cache
def ours(kind: str) -> ModelTokenizer:
    """The same tokenizer as the API has it."""
    packed = pack_tokenizer(hugging_face(kind), (END,))
    assert packed is not None
    return ModelTokenizer.read(packed)
