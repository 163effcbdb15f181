"""Which samplers of a pool live, and how much each has to do: they say so in Redis every second.

The `workers` table knows the same, but only every few seconds, and whoever routes samples must not ask a database.
"""

from __future__ import annotations

from collections.abc import Sequence

import redis
import redis.asyncio

from app.sampling.keys import samplers_key

ANNOUNCE_EVERY_S = 1.0
SILENCE_S = 3.0
"""A sampler that has said nothing for so long does not count as live."""
_FORGOTTEN_AFTER_S = 60

_ANNOUNCE = """
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], now[1] .. '.' .. string.format('%06d', now[2]) .. ' ' .. ARGV[2])
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""

_LIVE = """
local now = redis.call('TIME')
local latest_death = now[1] + now[2] / 1000000 - ARGV[1]
local all, live = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #all, 2 do
  local at, load = string.match(all[i + 1], '^(%S+) (%d+)$')
  if tonumber(at) > latest_death then
    live[#live + 1] = all[i]
    live[#live + 1] = load
  else
    redis.call('HDEL', KEYS[1], all[i])
  end
end
return live
"""


class SamplerPresence:
    """One sampler's side."""

    def __init__(self, client: redis.Redis, *, pool: str, worker_id: str) -> None:
        self._redis = client
        self._key = samplers_key(pool)
        self._worker_id = worker_id
        self._announce = client.register_script(_ANNOUNCE)
        self._live = client.register_script(_LIVE)

    def announce(self, sequences: int) -> None:
        """Say that this sampler lives and has so many sequences to sample, those that wait included."""
        self._announce(keys=[self._key], args=[self._worker_id, sequences, _FORGOTTEN_AFTER_S])

    def loads(self) -> dict[str, int]:
        """Sequences that each live sampler of the pool has to do."""
        return _as_loads(self._live(keys=[self._key], args=[SILENCE_S]))

    def leave(self) -> None:
        """Say that this sampler takes no more."""
        self._redis.hdel(self._key, self._worker_id)


class Samplers:
    """The side of those who route."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._live = client.register_script(_LIVE)

    async def loads(self, pool: str) -> dict[str, int]:
        """Sequences that each live sampler of a pool has to do, by its worker id: one round trip."""
        return _as_loads(await self._live(keys=[samplers_key(pool)], args=[SILENCE_S]))


def _as_loads(flat: Sequence[bytes]) -> dict[str, int]:
    return {flat[i].decode(): int(flat[i + 1]) for i in range(0, len(flat), 2)}
