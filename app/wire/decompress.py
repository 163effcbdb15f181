"""Request bodies: read and unpacked under a bound, so that a small body cannot become a large one in memory."""

from __future__ import annotations

import io

import zstandard

from app.errors import InvalidRequest, TooLarge

_CHUNK_BYTES = 1 << 18


def too_large(limit: int) -> TooLarge:
    """The error for a body over `limit` bytes."""
    return TooLarge(f"the request body exceeds {limit} bytes after decompression")


def unpack(body: bytes, encoding: str, *, limit: int) -> bytes:
    """`body` decoded from its Content-Encoding (`zstd`, or none). Raises TooLarge beyond `limit` bytes."""
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise InvalidRequest(f"Content-Encoding: {encoding!r} is not supported; use zstd or none")
    parts, size = [], 0
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(io.BytesIO(body)) as reader:
            while chunk := reader.read(_CHUNK_BYTES):
                size += len(chunk)
                if size > limit:
                    raise too_large(limit)
                parts.append(chunk)
    except zstandard.ZstdError as error:
        raise InvalidRequest("Content-Encoding: the body is not a valid zstd frame") from error
    return b"".join(parts)
