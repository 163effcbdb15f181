"""Feeds: which samples of one client are over, told in order and until the client has acknowledged it (WIRE §3.5).

A feed belongs to one client of a sampling session and lives in Redis, so any API process can answer. Requests that were
accepted and that Redis does not know any more are told as failed: the client then asks for them, hears that they are
gone, and sends them again. Of those that Redis forgot together with the whole feed, the process that accepted them
reminds it (`accepted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import redis.asyncio

from app.futures.waiters import DONE_CHANNEL
from app.sampling import scripts
from app.sampling.keys import feed_of

TOLD_CHANNEL = "tinworks:told"
"""Channel of what clients have acknowledged: request ids, one per line."""

READ_AT_MOST = 1000
FORGET_AT_MOST = 10_000
_LOOK_EVERY_MS = 5000
_LOOK_AT_MOST = 5000
_REMIND_AT_ONCE = 500
_KEPT_AFTER_DELIVERY_S = 60
"""A result stays so long after its client has said that it has it: a copy of the poll may be under way."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A sample that is over. `size`: bytes of its result; None if it failed."""

    request_id: str
    size: int | None


class CompletionFeeds:
    """The API's side of all feeds."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._read = client.register_script(scripts.READ_FEED)
        self._forget = client.register_script(scripts.FORGET_RESULTS)
        self._remind = client.register_script(scripts.REMIND)

    async def read(self, feed: str, cursor: int) -> tuple[list[Completion], int]:
        """What is new since `cursor`, oldest first, and the new cursor; what `cursor` covers is dropped."""
        args = (feed, cursor, READ_AT_MOST, _LOOK_EVERY_MS, _LOOK_AT_MOST, TOLD_CHANNEL)
        flat: list[bytes] = await self._read(args=args)
        completions = [_completion(entry.decode()) for entry in flat[::2]]
        return completions, int(float(flat[-1])) if flat else cursor

    async def forget(self, request_ids: Sequence[str]) -> None:
        """Keep these results for a minute only: their client has them."""
        if request_ids:
            await self._forget(args=[_KEPT_AFTER_DELIVERY_S, *request_ids[:FORGET_AT_MOST]])

    async def remind(self, request_ids: Sequence[str]) -> None:
        """Have the feeds tell what has become of accepted samples, whatever Redis has forgotten of them: what it does
        not know any more has failed, and what a sampler finished meanwhile is finished."""
        for start in range(0, len(request_ids), _REMIND_AT_ONCE):
            some = request_ids[start : start + _REMIND_AT_ONCE]
            await self._remind(args=[DONE_CHANNEL, *(part for rid in some for part in (rid, feed_of(rid)))])


def _completion(entry: str) -> Completion:
    state, _, request_id = entry.partition(" ")
    return Completion(request_id, int(state[1:]) if state[0] == "f" else None)
