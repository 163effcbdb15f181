"""Tokens told while their sample runs: a turn's go to one Redis stream per request, and one notice names them all."""

from __future__ import annotations

from collections import defaultdict

from redis import Redis

from app.futures.waiters import DONE_CHANNEL
from app.sampling.keys import TOKENS_FIELD, tokens_key
from app.sampling.store import REQUEST_TTL_S
from app.wire.streaming import encode_tokens
from app.wire.types import StreamedToken
from workers.sample.engines.base import OnToken


class TokenStreams:
    """The streamed samples of one worker. Used by the thread that turns the engine only."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._new: dict[str, list[StreamedToken]] = defaultdict(list)

    def listener(self, request_id: str) -> OnToken:
        """What a job of this request tells its tokens."""
        return lambda token: self._new[request_id].append(token)

    def publish(self) -> None:
        """Send what is new, in one round trip. What cannot be sent waits for the next time. Raises RedisError."""
        if not self._new:
            return
        pipeline = self._redis.pipeline(transaction=False)
        for request_id, tokens in self._new.items():
            key = tokens_key(request_id)
            pipeline.xadd(key, {TOKENS_FIELD: encode_tokens(tokens)})
            pipeline.expire(key, REQUEST_TTL_S)
        pipeline.publish(DONE_CHANNEL, "\n".join(self._new))
        pipeline.execute()
        self._new.clear()
