"""Tokens on their way from a sampler to a client that watches: a JSON list of one turn's tokens."""

from __future__ import annotations

from collections.abc import Iterable

import orjson

from app.wire.types import StreamedToken


def encode_tokens(tokens: Iterable[StreamedToken]) -> bytes:
    """JSON bytes: each token as index, position, token id, logprob, top k."""
    return orjson.dumps([[t.index, t.position, t.token, t.logprob, t.topk] for t in tokens])


def decode_tokens(raw: bytes) -> list[StreamedToken]:
    """The inverse of `encode_tokens`."""
    return [
        StreamedToken(index, position, token, logprob, [(id, value) for id, value in topk])
        for index, position, token, logprob, topk in orjson.loads(raw)
    ]
