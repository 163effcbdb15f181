"""A base model's tokenizer in the API: read from the blob that its workers stored, run by the `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import orjson
from tokenizers import Tokenizer

from app.compat.template import ChatTemplates

_FORMAT = 1
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "▁"


class ModelTokenizer:
    """Texts to token ids and back. `eos_token_ids`: what ends a sequence; `special`: tokens that are no text."""

    def __init__(self, tokenizer: Tokenizer, templates: ChatTemplates, eos_token_ids: Iterable[int]) -> None:
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._tokenizer = tokenizer
        self.templates = templates
        self.eos_token_ids = tuple(eos_token_ids)
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(id for id, token in added.items() if token.special)
        self._added = {id: token.content for id, token in added.items()}
        self._bytewise = '"ByteLevel"' in _decoder_types(tokenizer)

    @classmethod
    def read(cls, packed: bytes) -> ModelTokenizer:
        """From the blob. Raises ValueError for a format that this release does not know."""
        content: dict[str, Any] = orjson.loads(packed)
        if content["format"] != _FORMAT:
            raise ValueError("the tokenizer was stored by a newer release")
        tokenizer = Tokenizer.from_buffer(orjson.dumps(content["tokenizer"]))
        templates = ChatTemplates(content["chat_template"], content["special_tokens"])
        return cls(tokenizer, templates, content["eos_token_ids"])

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text; with `add_special_tokens` also those that the model wants around every text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without the special ones; ids without a token count for nothing."""
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=True)
        return text

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for, also where that is a part of a character; special tokens as they are written."""
        if token in self._added:
            return self._added[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._bytewise:
            table = _bytes_by_character()
            return b"".join(table.get(character) or character.encode() for character in piece)
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return str(piece).replace(_SPACE, " ").encode()


def _decoder_types(tokenizer: Tokenizer) -> str:
    decoder = orjson.loads(tokenizer.to_str())["decoder"]
    return orjson.dumps(decoder).decode()


@lru_cache(maxsize=1)
def _bytes_by_character() -> dict[str, bytes]:
    """How byte-level tokenizers write bytes: printable Latin-1 characters as themselves, the other bytes as the
    characters from 256 on (GPT-2, Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): bytes([byte]) for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return table | {chr(256 + i): bytes([byte]) for i, byte in enumerate(others)}
