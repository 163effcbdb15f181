"""A compressed body is unpacked whole, or refused; never into more memory than the limit."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidRequest, TooLarge
from app.wire.decompress import unpack

LIMIT = 1 << 20


def packed(data: bytes, *, content_size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=content_size).compress(data)


@given(st.binary(max_size=5000), st.booleans())
def test_a_zstd_body_comes_back_with_and_without_a_declared_size(data: bytes, content_size: bool) -> None:
    assert unpack(packed(data, content_size=content_size), "zstd", limit=LIMIT) == data


@pytest.mark.parametrize("encoding", ["", "identity"])
def test_a_plain_body_is_left_alone(encoding: str) -> None:
    assert unpack(b"plain", encoding, limit=LIMIT) == b"plain"


def test_a_body_of_exactly_the_limit_is_taken_and_one_byte_more_is_not() -> None:
    assert len(unpack(packed(bytes(LIMIT)), "zstd", limit=LIMIT)) == LIMIT
    with pytest.raises(TooLarge, match=str(LIMIT)):
        unpack(packed(bytes(LIMIT + 1)), "zstd", limit=LIMIT)


MEMORY = """
import resource, sys, zstandard
from app.errors import TooLarge
from app.wire.decompress import unpack
compressor = zstandard.ZstdCompressor().compressobj()
zeros = bytes(1 << 20)
body = b"".join(compressor.compress(zeros) for _ in range(1024)) + compressor.flush()
del compressor
assert len(body) < 1 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    unpack(body, "zstd", limit=16 << 20)
except TooLarge:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_small_body_that_would_unfold_to_a_gigabyte_costs_little_memory() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    assert int(done.stdout) * unit < 128 << 20
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_body_that_was_cut_off_is_refused(kept: float) -> None:
    body = packed(bytes(range(256)) * 4000)
    with pytest.raises(InvalidRequest, match="zstd"):
        unpack(body[: int(len(body) * kept)], "zstd", limit=LIMIT * 4)


@pytest.mark.parametrize("tail", [b"more", packed(b"a second frame")])
def test_bytes_after_the_frame_are_refused(tail: bytes) -> None:
    with pytest.raises(InvalidRequest, match="zstd"):
        unpack(packed(b"a frame") + tail, "zstd", limit=LIMIT)


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_refused_as_invalid(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="zstd"):
        unpack(body, "zstd", limit=LIMIT)


@pytest.mark.parametrize("encoding", ["gzip", "zstd, gzip", "br"])
def test_another_encoding_is_refused_by_name(encoding: str) -> None:
    with pytest.raises(InvalidRequest, match=encoding):
        unpack(b"", encoding, limit=LIMIT)
