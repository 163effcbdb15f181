"""Workers store their tokenizer once, under a name that its content decides."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from app.compat.tokenizer import ModelTokenizer
from app.storage.blobs import LocalBlobStore
from workers.model.tiny import TURN_END, make_tokenizer
from workers.model.tokenizer import store_tokenizer


def base(tokenizer: Any, *eos: int) -> Any:
    return SimpleNamespace(tokenizer=lambda: tokenizer, eos_token_ids=eos, name_or_path="tiny")


def test_the_same_tokenizer_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = LocalBlobStore(tmp_path)
    tokenizer = make_tokenizer()
    key = store_tokenizer(base(tokenizer, 2), blobs)
    assert key is not None
    monkeypatch.setattr(blobs, "put", None)
    assert store_tokenizer(base(tokenizer, 2), blobs) == key
    read = ModelTokenizer.read(blobs.get(key))
    assert read.eos_token_ids == (2,)
    assert read.encode(f"Hello{TURN_END}", add_special_tokens=True) == tokenizer.encode(f"Hello{TURN_END}")


def test_another_template_is_another_tokenizer(tmp_path: Path) -> None:
    blobs, tokenizer = LocalBlobStore(tmp_path), make_tokenizer()
    before = store_tokenizer(base(tokenizer, 2), blobs)
    tokenizer.chat_template = "{{ messages }}"
    assert store_tokenizer(base(tokenizer, 2), blobs) != before


def test_a_model_without_a_tokenizer_is_served_all_the_same(tmp_path: Path) -> None:
    def missing() -> None:
        raise OSError("no tokenizer.json")

    blobs = LocalBlobStore(tmp_path)
    with capture_logs():
        assert store_tokenizer(SimpleNamespace(tokenizer=missing, name_or_path="x", eos_token_ids=()), blobs) is None  # type: ignore[arg-type]
        assert store_tokenizer(base(SimpleNamespace(), 2), blobs) is None
