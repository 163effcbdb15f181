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

REQUEST_TTL_S = 3600
MAX_CLAIMS = 3

_SUBMIT = """
if redis.call('EXISTS', KEYS[1]) == 1 then return redis.call('GET', KEYS[1]) end
if redis.call('ZCARD', KEYS[2]) >= tonumber(ARGV[2]) then return 'full' end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3])
local now = redis.call('TIME')
redis.call('ZADD', KEYS[2], now[1] + now[2] / 1000000, ARGV[4])
return 'new'
"""

_CLAIM = """
local got = {}
for i, id in ipairs(ARGV) do
  if i > 2 then
    local unfinished = redis.call('ZSCORE', KEYS[1], id)
    if unfinished and redis.call('SET', 'sample:' .. id .. ':claim', ARGV[1], 'NX', 'PX', ARGV[2]) then
      local body = redis.call('GET', 'sample:' .. id .. ':request')
      if body then
        redis.call('INCR', 'sample:' .. id .. ':claims')
        redis.call('EXPIRE', 'sample:' .. id .. ':claims', 3600)
        got[#got + 1] = id
        got[#got + 1] = body
        got[#got + 1] = redis.call('GET', 'sample:' .. id .. ':claims')
      else
        redis.call('ZREM', KEYS[1], id)
      end
    end
  end
end
return got
"""

_RENEW = """
for _, key in ipairs(KEYS) do
  local holder = redis.call('GET', key)
  if not holder or holder == ARGV[1] then redis.call('SET', key, ARGV[1], 'PX', ARGV[2]) end
end
"""

_RELEASE = """
for i = 1, #KEYS, 2 do
  if redis.call('GET', KEYS[i]) == ARGV[1] then
    redis.call('DEL', KEYS[i])
    redis.call('DECR', KEYS[i + 1])
    redis.call('EXPIRE', KEYS[i + 1], ARGV[2])
  end
end
"""


def request_key(request_id: str) -> str:
    """Key of a stored request."""
    return f"sample:{request_id}:request"


def result_key(request_id: str) -> str:
    """Key of a result."""
    return f"sample:{request_id}:result"


def claim_key(request_id: str) -> str:
    """Key that a sampler holds while it works on a request."""
    return f"sample:{request_id}:claim"


def claims_key(request_id: str) -> str:
    """Key that counts the claims on a request that were not given up."""
    return f"sample:{request_id}:claims"


def unfinished_key(pool: str) -> str:
    """Sorted set of the pool's unfinished requests, by the time of their arrival."""
    return f"samples:{pool}"


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


class SampleInbox:
    """The API's side."""

    def __init__(self, client: redis.asyncio.Redis, *, max_waiting: int) -> None:
        self._redis = client
        self._max_waiting = max_waiting
        self._submit = client.register_script(_SUBMIT)

    async def submit(self, request_id: str, pool: str, body: bytes) -> Literal["new", "full"] | bytes:
        """Store a request; returns the stored one's bytes if its id was used before."""
        answer = await self._submit(
            keys=[request_key(request_id), unfinished_key(pool)],
            args=[body, self._max_waiting, REQUEST_TTL_S, request_id],
        )
        if answer == b"new":
            return "new"
        return "full" if answer == b"full" else bytes(answer)

    async def find(self, request_id: str) -> tuple[bytes | None, bool]:
        """The packed result, if there is one, and whether the request is known at all."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(result_key(request_id))
        pipeline.exists(request_key(request_id))
        result, known = await pipeline.execute()
        return result, bool(known)

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
        self._claim = client.register_script(_CLAIM)
        self._renew = client.register_script(_RENEW)
        self._release = client.register_script(_RELEASE)

    def claim(self, request_ids: Sequence[str]) -> list[Claimed]:
        """Claim those of the requests that are unfinished and free."""
        flat = self._claim(keys=[unfinished_key(self._pool)], args=[self._worker_id, self._claim_ms, *request_ids])
        return [Claimed(flat[i].decode(), flat[i + 1], int(flat[i + 2])) for i in range(0, len(flat), 3)]

    def renew(self, request_ids: Iterable[str]) -> None:
        """Keep the claims of running requests alive: one round trip. One that another sampler holds stays his."""
        keys = [claim_key(request_id) for request_id in request_ids]
        self._renew(keys=keys, args=[self._worker_id, self._claim_ms])

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
        """Store results, end claims and tell the waiting polls: one round trip."""
        if not answers:
            return
        pipeline = self._redis.pipeline(transaction=False)
        for request_id, answer in answers:
            pipeline.set(result_key(request_id), answer.pack(), ex=self._result_ttl_s)
            pipeline.expire(request_key(request_id), self._result_ttl_s)  # both gone: lost, not pending
            pipeline.zrem(unfinished_key(self._pool), request_id)
            pipeline.delete(claim_key(request_id))
        pipeline.publish(DONE_CHANNEL, "\n".join(request_id for request_id, _ in answers))
        pipeline.execute()
