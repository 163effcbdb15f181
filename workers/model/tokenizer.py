"""A model's tokenizer as the API reads it: one JSON blob, found by its content, written when a worker starts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import structlog
from transformers import PreTrainedTokenizerBase

from app.storage.blobs import BlobMissing, BlobStore
from workers.model.base import BaseModel

log = structlog.get_logger(__name__)

TOKENIZER_FORMAT = 1


def store_tokenizer(base: BaseModel, blobs: BlobStore) -> str | None:
    """Write the tokenizer of a model unless it is there, and return its key; None if the model has none that the
    `tokenizers` library can run."""
    try:
        packed = pack_tokenizer(base.tokenizer(), base.eos_token_ids)
    except (OSError, ValueError, ImportError) as error:  # what transformers raises where there are no files of one
        log.warning("no_tokenizer", model=base.name_or_path, error=type(error).__name__)
        return None
    if packed is None:
        log.warning("no_tokenizer", model=base.name_or_path, error="it is none of the `tokenizers` library")
        return None
    key = f"tokenizers/{hashlib.sha256(packed).hexdigest()}.json"
    try:
        blobs.size(key)
    except BlobMissing:
        blobs.put(key, packed)
    return key


def pack_tokenizer(tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...]) -> bytes | None:
    """A JSON object: `format`, `tokenizer` (the content of tokenizer.json), `chat_template` (Jinja text, or texts by
    name, or null), `special_tokens` (what templates see as variables) and `eos_token_ids` (what ends a sequence)."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    content = {
        "format": TOKENIZER_FORMAT,
        "tokenizer": json.loads(backend.to_str()),
        "chat_template": tokenizer.chat_template,
        "special_tokens": _plain(tokenizer.special_tokens_map),
        "eos_token_ids": list(eos_token_ids),
    }
    return json.dumps(content, ensure_ascii=False, sort_keys=True).encode("utf-8", "surrogatepass")


def _plain(tokens: Mapping[str, object]) -> dict[str, str | list[str]]:
    return {
        name: [str(token) for token in value] if isinstance(value, list | tuple) else str(value)
        for name, value in tokens.items()
    }
