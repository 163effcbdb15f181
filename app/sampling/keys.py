"""Names in Redis of samples and of the feeds that tell a client which of its samples are over."""

from __future__ import annotations

SEQUENCES_PER_CLIENT = 1_000_000_000
"""A sampling session's n-th client numbers its samples from n times this (WIRE §3.5)."""
SAMPLE_MARK = ":sample:"
"""What follows a session's id in those of its sampling sessions and samples."""

FEED_MARK = "feed:"
TOKENS_FIELD = b"t"
"""What an entry of a stream of tokens holds (`app.wire.streaming`)."""


def request_key(request_id: str) -> str:
    """Key of a stored request."""
    return f"sample:{request_id}:request"


def result_key(request_id: str) -> str:
    """Key of a result."""
    return f"sample:{request_id}:result"


def tokens_key(request_id: str) -> str:
    """Redis stream of the tokens of a request that is streamed."""
    return f"sample:{request_id}:tokens"


def claim_key(request_id: str) -> str:
    """Key that a sampler holds while it works on a request."""
    return f"sample:{request_id}:claim"


def claims_key(request_id: str) -> str:
    """Key that counts the claims on a request that were not given up."""
    return f"sample:{request_id}:claims"


def unfinished_key(pool: str) -> str:
    """Sorted set of the pool's unfinished requests, by the time since when nobody is expected to hold them."""
    return f"samples:{pool}"


def refused_key(pool: str, owner_id: str) -> str:
    """Key that is there while an owner was refused lately, and says what was full."""
    return f"samples:{pool}:refused:{owner_id}"


def samplers_key(pool: str) -> str:
    """Hash of the pool's live samplers: when each was last heard of, and how much it has to do."""
    return f"samplers:{pool}"


def cancel_channel(pool: str) -> str:
    """Channel of cancelled requests of a pool."""
    return f"tinworks:cancel:{pool}"


def feed_key(sampling_session_id: str, client: int) -> str:
    """Prefix of the feed of one client of a sampling session."""
    return f"{FEED_MARK}{sampling_session_id}/{client}"


def feed_of(request_id: str) -> str:
    """Prefix of the feed that a sample belongs to; of any other request, a name that no feed has."""
    session_id, _, number = request_id.rpartition(":")
    client = int(number) // SEQUENCES_PER_CLIENT if number.isascii() and number.isdigit() and len(number) < 20 else -1
    return feed_key(session_id, client)
