"""Samples as futures: what has become of them, what a client's feed says, and cancelling them."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from redis.exceptions import RedisError
from sqlalchemy import select, update
from starlette.concurrency import run_in_threadpool

from app.db import Database
from app.errors import Gone, NotFound, Unavailable
from app.recent import Recent
from app.sampling.feeds import Completion, CompletionFeeds
from app.sampling.keys import feed_key
from app.sampling.models import SamplingSession
from app.sampling.store import Full, SampleAnswer, SampleInbox, StoredAnswer
from app.sessions.models import ClientSession

_REMEMBERED_S = 300.0
"""How long the facts of a sampling session are kept at hand after they were looked up; they never change."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Place:
    """Whose a sample is, and which pool samples it."""

    owner_id: str
    pool: str


class SampleFutures:
    """The futures of samples. Whose they are is their sampling session's matter; the rest is in Redis."""

    def __init__(self, database: Database, inbox: SampleInbox, feeds: CompletionFeeds) -> None:
        self._database = database
        self._inbox = inbox
        self._feeds = feeds
        self._samplers: Recent[str, Place] = Recent(ttl_s=_REMEMBERED_S)

    async def look_up(self, owner_id: str, request_id: str, *, at_most: int | None = None) -> StoredAnswer | None:
        """A finished sample, without its payload if that has more than `at_most` bytes; None while it is pending.
        Raises NotFound, or Gone when it was lost."""
        await self._owned(owner_id, _session_of(request_id))
        answer, known = await _redis(self._inbox.find(request_id, at_most=at_most))
        if answer is None and not known:
            raise Gone(f"request_id: the sample {request_id!r} is not kept any more; send it again")
        return answer

    async def find_finished(self, request_ids: Sequence[str]) -> set[str]:
        """Which of these samples are finished or lost."""
        return await self._inbox.finished(request_ids)

    async def cancel(self, owner_id: str, request_id: str) -> bool:
        """End a sample that is not finished; it becomes a failure, and its sampler drops it. Raises NotFound."""
        sampler = await self._owned(owner_id, _session_of(request_id))
        answer = SampleAnswer.failed("the sample was cancelled by its client", "user")
        return await _redis(self._inbox.cancel(request_id, sampler.pool, answer))

    async def feed(self, owner_id: str, sampling_session_id: str, client: int) -> str:
        """The name of a client's feed. Raises NotFound."""
        await self._owned(owner_id, sampling_session_id)
        return feed_key(sampling_session_id, client)

    async def read_feed(self, feed: str, cursor: int) -> tuple[list[Completion], int]:
        """What a feed has told since `cursor`, and the new cursor."""
        return await _redis(self._feeds.read(feed, cursor))

    async def delivered(self, sampling_session_id: str, request_ids: Sequence[str]) -> None:
        """A client has these results of its sampling session; other ids are passed over."""
        own = [request_id for request_id in request_ids if _session_of(request_id) == sampling_session_id]
        await _redis(self._feeds.forget(own))

    async def place_of(self, request_id: str) -> Place:
        """Where a request waits. Raises NotFound."""
        return await self._sampler(_session_of(request_id))

    async def refused(self, place: Place) -> Full | None:
        """What has kept this owner's newest samples out of the pool in the last seconds, if something has."""
        return await _redis(self._inbox.refused(place.pool, place.owner_id))

    @property
    def most_of_an_owner(self) -> int:
        """How many samples of one owner may wait in a pool."""
        return self._inbox.depths.owner

    def join(self, owner_id: str, sampling_session_id: str) -> int:
        """A number for one more client of a sampling session: 1 or more, never given twice. Raises NotFound, Gone."""
        with self._database.write() as session:
            finished_at = session.execute(
                select(ClientSession.finished_at)
                .join(SamplingSession, SamplingSession.session_id == ClientSession.id)
                .where(SamplingSession.id == sampling_session_id, SamplingSession.owner_id == owner_id)
            ).one_or_none()
            if finished_at is None:
                raise _no_sampler(sampling_session_id)
            if finished_at[0] is not None:
                raise Gone(f"sampling_session_id: the session of {sampling_session_id!r} is finished")
            joined = session.execute(
                update(SamplingSession)
                .where(SamplingSession.id == sampling_session_id)
                .values(clients=SamplingSession.clients + 1)
                .returning(SamplingSession.clients)
                .execution_options(synchronize_session=False)
            )
            return joined.scalar_one()

    async def _owned(self, owner_id: str, sampling_session_id: str) -> Place:
        sampler = await self._sampler(sampling_session_id)
        if sampler.owner_id != owner_id:
            raise _no_sampler(sampling_session_id)
        return sampler

    async def _sampler(self, sampling_session_id: str) -> Place:
        sampler = self._samplers.get(sampling_session_id)
        if sampler is None:
            sampler = await run_in_threadpool(self._load, sampling_session_id)
            self._samplers.put(sampling_session_id, sampler)
        return sampler

    def _load(self, sampling_session_id: str) -> Place:
        query = select(SamplingSession.owner_id, SamplingSession.pool).where(SamplingSession.id == sampling_session_id)
        with self._database.read() as session:
            row = session.execute(query).one_or_none()
        if row is None:
            raise _no_sampler(sampling_session_id)
        return Place(row.owner_id, row.pool)


def _session_of(request_id: str) -> str:
    return request_id.rpartition(":")[0]


def _no_sampler(sampling_session_id: str) -> NotFound:
    return NotFound(f"sampling_session_id: there is no sampling session {sampling_session_id!r}")


async def _redis(answer: Awaitable[T]) -> T:
    try:
        return await answer
    except (RedisError, OSError) as error:
        raise Unavailable("the broker cannot be reached; try again") from error
