"""Samples without a sampling session: one request over HTTP that is answered when, or while, it is sampled.

Such a sample takes the way of all others: it waits in Redis, is claimed by a sampler, and its result is stored. Its id
is random, and whoever submitted it follows it to its end. If Redis forgets it meanwhile, it is submitted again under
the same id; with a seed that gives the same tokens, so that a follower who has seen some of them just goes on.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import orjson
import redis.asyncio
import structlog
from redis.exceptions import RedisError
from sqlalchemy.orm import Session

from app.checkpoints import service as checkpoints
from app.db import Database
from app.errors import InvalidRequest, NotFound, TinworksError, TooBusy, Unavailable
from app.fleet.doorbells import DoorbellPublisher
from app.fleet.service import ServedModel, find_model
from app.futures.waiters import Waiters
from app.sampling.keys import SAMPLE_MARK, TOKENS_FIELD, request_key, result_key, tokens_key
from app.sampling.router import SampleRouter
from app.sampling.store import SampleAnswer, SampleInbox, StoredAnswer, too_busy
from app.wire.sampling import StoredSample, encode_stored
from app.wire.streaming import decode_tokens
from app.wire.types import SampleRequest, StreamedToken

log = structlog.get_logger(__name__)

NO_SESSION = ""
"""What usage names as the session of these samples."""
_TINKER = "tinker://"
_OUTAGE_S = 60.0
"""How long a sample is followed while Redis is away."""
_AGAIN_S = 0.5


class SampleFailed(TinworksError):
    """The sampler could not make the sample."""


@dataclass(frozen=True, slots=True)
class DirectTarget:
    """What to sample from: a base model, or a snapshot of one of its adapters."""

    owner_id: str
    model: ServedModel
    snapshot_id: str | None


@dataclass(slots=True)
class DirectSample:
    """A submitted sample: where it is, and what to submit again if it is lost. `cursor`: up to where its tokens have
    been read."""

    request_id: str
    stored: StoredSample
    body: bytes
    cursor: bytes = b"-"
    over: bool = field(default=False)


@dataclass(frozen=True, slots=True)
class Progress:
    """News of a sample: tokens, in order but for repetitions after a sampler's death, and at last the bytes of its
    SampleResponse (WIRE §4.3)."""

    tokens: list[StreamedToken]
    response: bytes | None = None


def new_request_id() -> str:
    """An id that no sampling session has samples under."""
    return f"direct{SAMPLE_MARK}{uuid.uuid4().hex}"


class DirectSampling:
    """Direct samples of one API process."""

    def __init__(
        self,
        database: Database,
        client: redis.asyncio.Redis,
        inbox: SampleInbox,
        router: SampleRouter,
        doorbells: DoorbellPublisher,
        waiters: Waiters,
    ) -> None:
        self._database = database
        self._redis = client
        self._inbox = inbox
        self._router = router
        self._doorbells = doorbells
        self._waiters = waiters

    def target(self, owner_id: str, name: str) -> DirectTarget:
        """What `name` stands for: a base model, or the path of a checkpoint that the owner can read. Raises
        NotFound."""
        with self._database.read() as session:
            if name.startswith(_TINKER):
                return _checkpoint(session, owner_id, name)
            model = find_model(session, name)
        if model is None:
            raise NotFound(f"model: no model {name!r} is served here; `GET /v1/models` lists what is")
        return DirectTarget(owner_id, model, None)

    async def submit(self, target: DirectTarget, request: SampleRequest, *, stream: bool) -> DirectSample:
        """Store a request for the samplers. Raises TooBusy or Unavailable."""
        model = target.model
        stored = StoredSample(
            target.owner_id, NO_SESSION, model.pool, target.snapshot_id, request, model.name, stream=stream
        )
        sample = DirectSample(request.request_id, stored, encode_stored(stored))
        await _reached(self._store(sample))
        return sample

    async def _store(self, sample: DirectSample) -> None:
        """Store a request and tell the samplers. Raises TooBusy."""
        stored, request = sample.stored, sample.stored.request
        outcome = await self._inbox.submit(sample.request_id, stored.pool, sample.body, owner_id=stored.owner_id)
        if outcome == "owner full" or outcome == "pool full":
            raise too_busy(outcome, self._inbox.depths, stored.base_model)
        home = await self._router.home(stored.pool, stored.snapshot_id, request.prompt, request.num_samples)
        self._doorbells.ring_sample(request_id=sample.request_id, pool=stored.pool, worker_id=home)

    async def follow(self, sample: DirectSample) -> AsyncGenerator[Progress, None]:
        """All news of a sample, the last with its response. Raises InvalidRequest or SampleFailed if it failed,
        Unavailable if Redis stays away or this process stops."""
        clock = asyncio.get_running_loop().time
        with self._waiters.waiting_for(sample.request_id) as news:
            away_since: float | None = None
            while True:
                news.clear()
                if self._waiters.stopping:
                    raise Unavailable("this server process stops; send the request again")
                try:
                    tokens, answer, known = await self._look(sample)
                    if answer is None and not known:
                        log.warning("sample_lost", request_id=sample.request_id)
                        with suppress(TooBusy):  # it stays lost until there is room
                            await self._store(sample)
                except (RedisError, OSError) as error:
                    away_since = away_since or clock()
                    if clock() - away_since > _OUTAGE_S:
                        raise _away() from error
                    await asyncio.sleep(_AGAIN_S)
                    continue
                away_since = None
                if answer is not None:
                    sample.over = True
                    yield Progress(tokens, _response(answer))
                    return
                if tokens:
                    yield Progress(tokens)
                await news.wait()

    async def _look(self, sample: DirectSample) -> tuple[list[StreamedToken], StoredAnswer | None, bool]:
        """What is new; the tokens are looked at last, so that a result comes with all of them or stands for them."""
        answer, known = await self._inbox.find(sample.request_id)
        if answer is not None:
            return [], answer, True
        entries: Any = await self._redis.xrange(tokens_key(sample.request_id), min=_after(sample.cursor))
        if entries:
            sample.cursor = entries[-1][0]
        return [token for _, values in entries for token in decode_tokens(values[TOKENS_FIELD])], None, known

    async def close(self, sample: DirectSample) -> None:
        """Nobody follows the sample any more: end it if it is not over, and forget it."""
        try:
            if not sample.over:
                answer = SampleAnswer.failed("the sample was cancelled by its client", "user")
                await self._inbox.cancel(sample.request_id, sample.stored.pool, answer)
                return
            request_id = sample.request_id
            await self._redis.delete(request_key(request_id), result_key(request_id), tokens_key(request_id))
        except (RedisError, OSError) as error:
            log.warning("sample_not_closed", request_id=sample.request_id, error=type(error).__name__)


def _checkpoint(session: Session, owner_id: str, path: str) -> DirectTarget:
    try:
        found = checkpoints.resolve(session, owner_id, path, field="model")
    except InvalidRequest as error:
        raise NotFound(error.detail) from error
    model = find_model(session, found.run.base_model)
    if model is None:
        raise NotFound(f"model: no worker serves {found.run.base_model!r}, the base model of {path!r}, any more")
    return DirectTarget(owner_id, model, found.snapshot.id)


def _after(cursor: bytes) -> bytes:
    return cursor if cursor == b"-" else b"(" + cursor


def _response(answer: StoredAnswer) -> bytes:
    payload = b"".join(answer.pieces)
    if answer.kind == "proto":
        return payload
    failure = orjson.loads(payload)
    raise InvalidRequest(failure["error"]) if failure["category"] == "user" else SampleFailed(failure["error"])


async def _reached(stored: Awaitable[None]) -> None:
    try:
        await stored
    except (RedisError, OSError) as error:
        raise _away() from error


def _away() -> Unavailable:
    return Unavailable("the broker cannot be reached; try again")
