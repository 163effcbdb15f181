"""Logprobs in OpenAI's shapes: tokens with their bytes, alternatives, and where in the text they are."""

from __future__ import annotations

import pytest

from app.compat.logprobs import LEAST, CompletionLogprobs, chat_logprobs
from app.compat.outcomes import Score
from tests.unit.app.compat.tokenizer_lab import END, ours


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_bytes_of_tokens_make_the_text(kind: str) -> None:
    tokenizer = ours(kind)
    text = "hello naïve 你好 🎃"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode().strip() == text


def test_a_chats_tokens_have_bytes_and_alternatives() -> None:
    tokenizer = ours("byte_level")
    token, *_ = tokenizer.encode("é", add_special_tokens=False)
    scores = [Score(token, -0.5, [(token, -0.5), (END, float("-inf"))]), Score(END, -1.0, [])]
    first, last = chat_logprobs(tokenizer, scores, 2)["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("\ufffd", -0.5, [0xC3])
    assert first["top_logprobs"][1] == {"token": "<|end|>", "logprob": LEAST, "bytes": list(b"<|end|>")}
    assert last["top_logprobs"] == []


def test_a_completions_offsets_count_characters_and_alternatives_include_the_token() -> None:
    tokenizer = ours("byte_level")
    text = "né🎃b"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    logprobs = CompletionLogprobs(tokenizer, 1)
    halves = [
        logprobs.of([Score(token, -1.0, [(END, -0.1)]) for token in half]) for half in (tokens[:3], tokens[3:])
    ]  # fmt: skip
    offsets = halves[0]["text_offset"] + halves[1]["text_offset"]
    assert offsets[0] == 0 and offsets[-1] == text.index("b") and offsets == sorted(offsets)
    assert halves[0]["top_logprobs"][0] == {"<|end|>": -0.1, "n": -1.0}


def test_the_first_token_of_a_prompt_has_no_logprob() -> None:
    first = CompletionLogprobs(ours("byte_level"), 1).of([Score(END, None, [])])
    assert first["token_logprobs"] == [None] and first["top_logprobs"] == [None]
