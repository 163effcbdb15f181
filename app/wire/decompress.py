"""Request bodies: read and unpacked under a bound, so that a small body cannot become a large one in memory."""

from __future__ import annotations

import zstandard

from app.errors import InvalidRequest, TooLarge

_INPUT_BYTES = 1 << 10
"""Unpacked at once. Zstd expands no more than 128 KiB from 4 bytes, so what exceeds the limit is noticed in time."""


def too_large(limit: int) -> TooLarge:
    """The error for a body over `limit` bytes."""
    return TooLarge(f"the request body exceeds {limit} bytes after decompression")


def unpack(body: bytes, encoding: str, *, limit: int) -> bytes:
    """`body` decoded from its Content-Encoding (`zstd`, or none). Raises TooLarge beyond `limit` bytes."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise InvalidRequest(f"Content-Encoding: {encoding!r} is not supported; use zstd or none")
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
    parts, size, view = [], 0, memoryview(body)
    try:
        for start in range(0, len(body), _INPUT_BYTES):
            part = decompressor.decompress(view[start : start + _INPUT_BYTES])
            size += len(part)
            if size > limit:
                raise too_large(limit)
            parts.append(part)
    except zstandard.ZstdError as error:
        raise InvalidRequest("Content-Encoding: the body is not a valid zstd frame") from error
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidRequest("Content-Encoding: the body is not one whole zstd frame")
    return b"".join(parts)
