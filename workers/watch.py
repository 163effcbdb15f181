"""How long the service has been up without a break, as the janitor's rounds see it.

A client is silent only while somebody could have heard it. Each round looks whether a web process listens for notices
in Redis; the time of the first of an unbroken row of rounds in which one did is kept there. A round that fails because
a store is away, or that nobody makes, breaks the row. So an outage of ours, of whatever part, counts as nobody's
silence.
"""

from __future__ import annotations

import time

from redis import Redis

from app.futures.waiters import DONE_CHANNEL

UP_SINCE_KEY = "tinworks:up-since"
_NEXT_ROUND_S = 100
"""Rounds come every 30 s; the row is broken when there was none for so long."""


def up_for_s(client: Redis) -> float:
    """Seconds since the first of the rounds that have found the service up one after the other; this is one of them."""
    if not _somebody_listens(client):
        client.delete(UP_SINCE_KEY)
        return 0.0
    client.set(UP_SINCE_KEY, time.time(), nx=True)
    client.expire(UP_SINCE_KEY, _NEXT_ROUND_S)
    since = client.get(UP_SINCE_KEY)
    return max(0.0, time.time() - float(since)) if isinstance(since, bytes) else 0.0


def _somebody_listens(client: Redis) -> bool:
    found = client.pubsub_numsub(DONE_CHANNEL)
    return any(count for _, count in found)
