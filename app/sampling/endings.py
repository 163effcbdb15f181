"""Samples that nobody waits for any more: those of sessions that are finished or have fallen silent.

They are forgotten rather than failed. A client that comes back after all hears that they are gone (410), and sends them
again by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime

import redis
from sqlalchemy import or_, select
from sqlalchemy.orm import Session

from app.futures.waiters import DONE_CHANNEL
from app.sampling import scripts
from app.sampling.keys import SAMPLE_MARK, cancel_channel, unfinished_key
from app.sessions.models import ClientSession

_AT_ONCE = 500


def forget_samples(client: redis.Redis, pool: str, request_ids: Sequence[str]) -> int:
    """Forget unfinished requests of a pool, and tell whoever samples them and whoever waits; returns how many."""
    forget = client.register_script(scripts.FORGET_SAMPLES)
    forgotten = 0
    for start in range(0, len(request_ids), _AT_ONCE):
        some = request_ids[start : start + _AT_ONCE]
        forgotten += forget(keys=[unfinished_key(pool)], args=[cancel_channel(pool), DONE_CHANNEL, *some])
    return forgotten


def forget_samples_of_ended_sessions(
    client: redis.Redis, session: Session, pools: Collection[str], *, silent_before: datetime
) -> int:
    """Forget the unfinished samples of sessions that are finished, or have been known to be silent since before a time;
    returns how many. Looks at all unfinished samples."""
    forgotten = 0
    for pool in pools:
        by_session: dict[str, list[str]] = defaultdict(list)
        for request_id in _unfinished(client, pool):
            by_session[request_id.partition(SAMPLE_MARK)[0]].append(request_id)
        for session_id in _ended(session, sorted(by_session), silent_before):
            forgotten += forget_samples(client, pool, by_session[session_id])
    return forgotten


def _unfinished(client: redis.Redis, pool: str) -> Iterator[str]:
    for raw, _ in client.zscan_iter(unfinished_key(pool), count=_AT_ONCE):
        yield raw.decode()


def _ended(session: Session, session_ids: Sequence[str], silent_before: datetime) -> Iterator[str]:
    over = or_(ClientSession.finished_at.is_not(None), ClientSession.silent_since < silent_before)
    for start in range(0, len(session_ids), _AT_ONCE):
        some = session_ids[start : start + _AT_ONCE]
        yield from session.scalars(select(ClientSession.id).where(ClientSession.id.in_(some), over))
