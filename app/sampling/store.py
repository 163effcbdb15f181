"""Samples in Redis: requests, results, who has claimed what. Key names and their rules live here, for both sides.

A sample is stateless work: the request waits under its deterministic id and in the pool's set of unfinished ones; a
sampler claims it for a few seconds at a time; the result replaces it. Whatever is unfinished and unclaimed may be taken
by anybody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import orjson
import redis
import redis.asyncio

from app.errors import TooBusy
from app.futures.waiters import DONE_CHANNEL
from app.sampling import scripts
from app.sampling.keys import (
    cancel_channel,
    feed_of,
    refused_key,
    request_key,
    result_key,
    unfinished_key,
)

REQUEST_TTL_S = 3600
MAX_CLAIMS = 3
PIECE_BYTES = 2**20
"""A larger result is read in pieces of this size, so that none keeps the event loop for long."""
_AT_ONCE = 500
"""Requests that one script touches, so that none keeps Redis for long."""

Full = Literal["owner full", "pool full"]
"""Whose unfinished requests have reached their limit."""


@dataclass(frozen=True, slots=True)
class Depths:
    """Largest numbers of unfinished requests: of a pool, and of one owner in a pool."""

    pool: int
    owner: int


def too_busy(full: Full, depths: Depths, model: str) -> TooBusy:
    """What a client hears whose sample was refused."""
    if full == "owner full":
        return TooBusy(f"{depths.owner} of your samples wait for {model!r}, more cannot; try again")
    return TooBusy(f"too many samples wait for {model!r}; try again")


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """A finished sample: `proto` bytes, or the JSON of an `error`."""

    kind: Literal["proto", "error"]
    payload: bytes

    def pack(self) -> bytes:
        """As it is stored: one letter for the kind, then the payload."""
        return self.kind[:1].encode() + self.payload

    @classmethod
    def unpack(cls, raw: bytes) -> SampleAnswer:
        """The inverse of `pack`."""
        return cls("proto" if raw[:1] == b"p" else "error", raw[1:])

    @classmethod
    def failed(cls, message: str, category: str) -> SampleAnswer:
        """A failure, as the client will read it."""
        return cls("error", orjson.dumps({"error": message, "category": category}))

    @property
    def entry(self) -> str:
        """What its client's feed says of it: `f` and the payload's size, or `x` for a failure."""
        return f"f{len(self.payload)}" if self.kind == "proto" else "x"


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """A finished sample as it was found: `size` of its payload in bytes, and the payload in pieces, none of them if
    it was larger than asked for."""

    kind: Literal["proto", "error"]
    size: int
    pieces: Sequence[bytes]


class SampleInbox:
    """The API's side. `keep_feeds`: of every client, not only of those that read theirs."""

    def __init__(
        self, client: redis.asyncio.Redis, *, depths: Depths, result_ttl_s: int = 900, keep_feeds: bool = False
    ) -> None:
        self._redis = client
        self.depths = depths
        self._result_ttl_s = result_ttl_s
        self._keep_feeds = int(keep_feeds)
        self._submit = client.register_script(scripts.SUBMIT)
        self._cancel = client.register_script(scripts.CANCEL)
        self._find = client.register_script(scripts.FIND)

    async def submit(self, request_id: str, pool: str, body: bytes, *, owner_id: str) -> Literal["new"] | Full | bytes:
        """Store a request; returns the stored one's bytes if its id was used before."""
        depths, feed = self.depths, feed_of(request_id)
        answer = await self._submit(
            keys=[request_key(request_id), unfinished_key(pool), refused_key(pool, owner_id)],
            args=[body, REQUEST_TTL_S, request_id, owner_id, depths.pool, depths.owner, feed, self._keep_feeds],
        )
        if answer == b"new":
            return "new"
        if answer == b"owner full":
            return "owner full"
        return "pool full" if answer == b"pool full" else bytes(answer)

    async def refused(self, pool: str, owner_id: str) -> Full | None:
        """What kept requests of this owner out in the last seconds, if something did."""
        full = await self._redis.get(refused_key(pool, owner_id))
        if full is None:
            return None
        return "owner full" if full == b"owner full" else "pool full"

    async def cancel(self, request_id: str, pool: str, answer: SampleAnswer) -> bool:
        """Finish a request that is not finished with `answer`, and tell whoever samples it. False: there is none."""
        channels = DONE_CHANNEL, cancel_channel(pool)
        told = answer.pack(), feed_of(request_id), answer.entry
        args = (self._result_ttl_s, *channels, request_id, *told)
        return bool(await self._cancel(keys=[unfinished_key(pool)], args=args))

    async def find(self, request_id: str, *, at_most: int | None = None) -> tuple[StoredAnswer | None, bool]:
        """The result, if there is one, and whether the request is known at all. A result of more than `at_most` bytes
        comes without its payload."""
        key = result_key(request_id)
        stored_bytes, first, known = await self._find(keys=[key, request_key(request_id)], args=[PIECE_BYTES])
        if not stored_bytes:
            return None, bool(known)
        kind: Literal["proto", "error"] = "proto" if first[:1] == b"p" else "error"
        size = stored_bytes - 1
        if at_most is not None and size > at_most and kind == "proto":
            return StoredAnswer(kind, size, ()), True
        pieces = [first[1:]]
        for start in range(len(first), stored_bytes, PIECE_BYTES):
            pieces.append(await self._redis.getrange(key, start, start + PIECE_BYTES - 1))
        if sum(map(len, pieces)) != size:  # it expired meanwhile
            return None, False
        return StoredAnswer(kind, size, pieces), True

    async def finished(self, request_ids: Sequence[str]) -> set[str]:
        """Which requests have a result, or were lost: both are news for whoever waits."""
        pipeline = self._redis.pipeline(transaction=False)
        for request_id in request_ids:
            pipeline.exists(result_key(request_id))
            pipeline.exists(request_key(request_id))
        flags = await pipeline.execute()
        return {rid for i, rid in enumerate(request_ids) if flags[2 * i] or not flags[2 * i + 1]}


@dataclass(frozen=True, slots=True)
class Claimed:
    """A request that this sampler may work on; `attempt` counts claims, the first is 1."""

    request_id: str
    body: bytes
    attempt: int


class SampleDesk:
    """A sampler's side."""

    def __init__(self, client: redis.Redis, *, pool: str, worker_id: str, claim_s: float, result_ttl_s: int) -> None:
        self._unfinished = unfinished_key(pool)
        self._worker_id = worker_id
        self._claim_ms = int(claim_s * 1000)
        self._result_ttl_s = result_ttl_s
        self._claim = client.register_script(scripts.CLAIM)
        self._renew = client.register_script(scripts.RENEW)
        self._release = client.register_script(scripts.RELEASE)
        self._count = client.register_script(scripts.COUNT)
        self._abandoned = client.register_script(scripts.ABANDONED)
        self._finish = client.register_script(scripts.FINISH)

    def claim(self, request_ids: Sequence[str]) -> list[Claimed]:
        """Claim those of the requests that are unfinished and free."""
        claimed: list[Claimed] = []
        for some in _portions(request_ids):
            flat = self._claim(keys=[self._unfinished], args=[self._worker_id, self._claim_ms, REQUEST_TTL_S, *some])
            claimed += [Claimed(flat[i].decode(), flat[i + 1], int(flat[i + 2])) for i in range(0, len(flat), 3)]
        return claimed

    def renew(self, request_ids: Iterable[str]) -> list[str]:
        """Keep the claims of requests alive. One that another sampler holds stays his.

        Returns those that need no more work: they were cancelled, another sampler has finished them, or Redis does not
        know them any more.
        """
        over: list[str] = []
        for some in _portions(request_ids):
            args: list[str | int] = [self._worker_id, self._claim_ms, REQUEST_TTL_S, *some]
            over += [raw.decode() for raw in self._renew(keys=[self._unfinished], args=args)]
        return over

    def release(self, request_ids: Iterable[str]) -> None:
        """Give claims up, so that another sampler may take the requests at once; a claim given up does not count."""
        for some in _portions(request_ids):
            self._release(keys=[self._unfinished], args=[self._worker_id, REQUEST_TTL_S, *some])

    def park(self, request_ids: Collection[str]) -> None:
        """These claimed requests wait for their turn. Their claim does not count while they do: whatever ends the
        sampler meanwhile, they had no part in it."""
        self._change_count(-1, request_ids)

    def begin(self, request_ids: Collection[str]) -> None:
        """The turn of parked requests has come: their claim counts."""
        self._change_count(1, request_ids)

    def _change_count(self, change: int, request_ids: Collection[str]) -> None:
        for some in _portions(request_ids):
            self._count(args=[change, REQUEST_TTL_S, *some])

    def abandoned(self, *, older_than_s: float, limit: int = 1000) -> list[str]:
        """Unfinished requests that nobody claims: those given up first, then those that have been without a sampler for
        so long, the oldest first."""
        return [raw.decode() for raw in self._abandoned(keys=[self._unfinished], args=[older_than_s, limit])]

    def finish(self, answers: Sequence[tuple[str, SampleAnswer]]) -> None:
        """Store results, end claims and tell the waiting polls: one round trip. A result that is there stays."""
        if not answers:
            return
        args: list[str | bytes | int] = [self._result_ttl_s, DONE_CHANNEL]
        for request_id, answer in answers:
            args += [request_id, answer.pack(), feed_of(request_id), answer.entry]
        self._finish(keys=[self._unfinished], args=args)


def _portions(request_ids: Iterable[str]) -> Iterator[list[str]]:
    remaining = iter(request_ids)
    while some := list(islice(remaining, _AT_ONCE)):
        yield some
