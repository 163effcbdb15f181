"""Request bodies: read and unpacked under a bound, so that a small body cannot become a large one in memory."""

from __future__ import annotations

import zstandard

from app.errors import InvalidRequest, TooLarge

_WINDOW_BYTES = 1 << 27
_INPUT_BYTES = 1 << 10
"""Unpacked at once. Zstd expands no more than 128 KiB from 4 bytes, so what exceeds the limit is noticed in time."""
_USUAL_RATIO = 16
"""A frame that says that it holds at most this many times its own size is unpacked in one go, into so much memory."""


def too_large(limit: int) -> TooLarge:
    """The error for a body over `limit` bytes."""
    return TooLarge(f"the request body exceeds {limit} bytes after decompression")


def unpack(body: bytes, encoding: str, *, limit: int) -> bytes:
    """`body` decoded from its Content-Encoding (`zstd`, or none). Raises TooLarge beyond `limit` bytes."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise InvalidRequest(f"Content-Encoding: {encoding!r} is not supported; use zstd or none")
    try:
        said = zstandard.get_frame_parameters(body).content_size
        if said not in (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR):
            if said > limit:
                raise too_large(limit)
            if 0 < said <= _USUAL_RATIO * len(body):
                return zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompress(
                    body, allow_extra_data=False
                )
        return _unpack_unknown(body, limit)
    except zstandard.ZstdError as error:
        raise InvalidRequest("Content-Encoding: the body is not one whole zstd frame") from error


def _unpack_unknown(body: bytes, limit: int) -> bytes:
    """A frame that does not say how much it holds, or says that it holds very much."""
    decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).decompressobj()
    parts, size, view = [], 0, memoryview(body)
    for start in range(0, len(body), _INPUT_BYTES):
        part = decompressor.decompress(view[start : start + _INPUT_BYTES])
        size += len(part)
        if size > limit:
            raise too_large(limit)
        parts.append(part)
    if not decompressor.eof or decompressor.unused_data:
        raise InvalidRequest("Content-Encoding: the body is not one whole zstd frame")
    return b"".join(parts)
