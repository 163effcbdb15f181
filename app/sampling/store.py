"""Samples in Redis: requests, results, who has claimed what. Key names and their rules live here, for both sides.

A sample is stateless work: the request waits under its deterministic id and in the pool's set of unfinished ones; a
sampler claims it for a few seconds at a time; the result replaces it. Whatever is unfinished and unclaimed may be taken
by anybody.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import orjson
import redis
import redis.asyncio

from app.futures.waiters import DONE_CHANNEL
from app.sampling import scripts
from app.sampling.keys import (
    cancel_channel,
    claim_key,
    claims_key,
    feed_of,
    request_key,
    result_key,
    unfinished_key,
)

REQUEST_TTL_S = 3600
MAX_CLAIMS = 3
PIECE_BYTES = 2**20
"""A larger result is read in pieces of this size, so that none keeps the event loop for long."""


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
        self, client: redis.asyncio.Redis, *, max_waiting: int, result_ttl_s: int = 900, keep_feeds: bool = False
    ) -> None:
        self._redis = client
        self._max_waiting = max_waiting
        self._result_ttl_s = result_ttl_s
        self._keep_feeds = int(keep_feeds)
        self._submit = client.register_script(scripts.SUBMIT)
        self._cancel = client.register_script(scripts.CANCEL)
        self._find = client.register_script(scripts.FIND)

    async def submit(self, request_id: str, pool: str, body: bytes) -> Literal["new", "full"] | bytes:
        """Store a request; returns the stored one's bytes if its id was used before."""
        answer = await self._submit(
            keys=[request_key(request_id), unfinished_key(pool)],
            args=[body, self._max_waiting, REQUEST_TTL_S, request_id, feed_of(request_id), self._keep_feeds],
        )
        if answer == b"new":
            return "new"
        return "full" if answer == b"full" else bytes(answer)

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
        self._redis = client
        self._pool = pool
        self._worker_id = worker_id
        self._claim_ms = int(claim_s * 1000)
        self._result_ttl_s = result_ttl_s
        self._claim = client.register_script(scripts.CLAIM)
        self._renew = client.register_script(scripts.RENEW)
        self._release = client.register_script(scripts.RELEASE)
        self._finish = client.register_script(scripts.FINISH)

    def claim(self, request_ids: Sequence[str]) -> list[Claimed]:
        """Claim those of the requests that are unfinished and free."""
        flat = self._claim(keys=[unfinished_key(self._pool)], args=[self._worker_id, self._claim_ms, *request_ids])
        return [Claimed(flat[i].decode(), flat[i + 1], int(flat[i + 2])) for i in range(0, len(flat), 3)]

    def renew(self, request_ids: Iterable[str]) -> list[str]:
        """Keep the claims of running requests alive: one round trip. One that another sampler holds stays his.

        Returns those that need no more work: they were cancelled, or another sampler has finished them.
        """
        return [raw.decode() for raw in self._renew(args=[self._worker_id, self._claim_ms, *request_ids])]

    def release(self, request_ids: Sequence[str]) -> None:
        """Give claims up, so that another sampler may take the requests at once; a claim given up does not count."""
        keys = [key for request_id in request_ids for key in (claim_key(request_id), claims_key(request_id))]
        self._release(keys=keys, args=[self._worker_id, REQUEST_TTL_S])

    def abandoned(self, *, older_than_s: float, limit: int = 1000) -> list[str]:
        """Unfinished requests that arrived a while ago and that nobody claims now."""
        seconds, micros = self._redis.time()
        latest = seconds + micros / 1e6 - older_than_s
        waiting = self._redis.zrangebyscore(unfinished_key(self._pool), "-inf", latest, start=0, num=limit)
        if not waiting:
            return []
        ids = [raw.decode() for raw in waiting]  # type: ignore[union-attr]
        claims = self._redis.mget([claim_key(request_id) for request_id in ids])
        return [request_id for request_id, claim in zip(ids, claims, strict=True) if claim is None]

    def finish(self, answers: Sequence[tuple[str, SampleAnswer]]) -> None:
        """Store results, end claims and tell the waiting polls: one round trip. A result that is there stays."""
        if not answers:
            return
        args: list[str | bytes | int] = [self._result_ttl_s, DONE_CHANNEL]
        for request_id, answer in answers:
            args += [request_id, answer.pack(), feed_of(request_id), answer.entry]
        self._finish(keys=[unfinished_key(self._pool)], args=args)
