"""What a future has become: pending, a result, or a failure (WIRE §3)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, ParamSpec, TypeVar

import orjson
import structlog
from anyio import CapacityLimiter, to_thread
from redis.exceptions import RedisError
from sqlalchemy import bindparam, select
from sqlalchemy.exc import SQLAlchemyError

from app.custom_losses import service as custom_losses
from app.db import Database, database_clock
from app.errors import Gone, NotFound
from app.fleet.models import Worker
from app.runs import limits, log
from app.runs.models import Operation, Run
from app.sampling.futures import Place, SampleFutures
from app.sampling.keys import FEED_MARK, SAMPLE_MARK
from app.shared_lookups import SharedLookups
from app.storage.blobs import BlobMissing, BlobStore
from app.wire.results_json import forward_backward_json, sample_json

logger = structlog.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_POLL_THREADS = 4
"""Threads, and so database connections, that polls have at most; heartbeats and submits never wait behind them."""
_JSON_THREADS = 2
"""Threads that write results as JSON; each needs the interpreter, so more would only starve the event loop."""
_BELIEVED_S = 1.0
"""How long a process believes what it saw of a pool's workers, of refused samples and of the gaps in a run's log."""
_EVER = 2**31 - 1


_FUTURE = (
    select(
        Operation.state,
        Operation.error,
        Operation.error_category,
        Operation.result_kind,
        Operation.result_blob,
        Operation.result,
    )
    .join(Run, Run.id == Operation.model_id)
    .where(Operation.request_id == bindparam("request_id"), Run.owner_id == bindparam("owner_id"))
)
"""Built once: building a statement costs more than running it, and every poll ends with this one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished future: protobuf bytes, JSON bytes, or the JSON of an error. `size` in bytes; no pieces at all if it
    was larger than asked for."""

    kind: Literal["proto", "json", "error"]
    size: int
    pieces: Sequence[bytes]

    @classmethod
    def of(cls, kind: Literal["proto", "json", "error"], payload: bytes) -> Answer:
        """All in one piece."""
        return cls(kind, len(payload), (payload,))


@dataclass(frozen=True, slots=True)
class QueueState:
    """Why a future is still pending, for `try_again`."""

    state: Literal["active", "paused_capacity", "paused_rate_limit"]
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class _RunState:
    """What keeps a run: the first sequence id that has not arrived; its pool; that its tenant has too many others."""

    awaited_seq: int | None
    pool: str | None
    crowded_out: str | None


async def _unless_away(look: Awaitable[set[str]]) -> set[str]:
    """What was found; nothing while the store is away."""
    try:
        return await look
    except (RedisError, SQLAlchemyError, OSError) as error:
        logger.warning("finished_unknown", error=type(error).__name__)
        return set()


def error_payload(message: str, category: str) -> bytes:
    """The JSON body of a failed future."""
    return orjson.dumps({"error": message, "category": category})


class FutureService:
    """Looks futures up, of training (the log) and of sampling (Redis)."""

    def __init__(
        self,
        database: Database,
        blobs: BlobStore,
        samples: SampleFutures,
        *,
        worker_silence_s: float,
        runs_per_tenant: int = 0,
    ) -> None:
        self._database = database
        self._blobs = blobs
        self._samples = samples
        self._worker_silence_s = worker_silence_s
        self._runs_per_tenant = runs_per_tenant
        self._limiter = CapacityLimiter(_POLL_THREADS)
        self._writers = CapacityLimiter(_JSON_THREADS)
        self._worker_states: SharedLookups[QueueState] = SharedLookups(ttl_s=_BELIEVED_S)
        self._refusals: SharedLookups[QueueState] = SharedLookups(ttl_s=_BELIEVED_S)
        self._run_states: SharedLookups[_RunState] = SharedLookups(ttl_s=_BELIEVED_S)

    async def look_up(self, owner_id: str, request_id: str, *, at_most: int | None = None) -> Answer | None:
        """What the owner's future has become, without its payload if that has more than `at_most` bytes; None while it
        is pending. Raises NotFound, or Gone for a lost sample."""
        if SAMPLE_MARK in request_id:
            found = await self._samples.look_up(owner_id, request_id, at_most=at_most)
            return Answer(found.kind, found.size, found.pieces) if found else None
        if custom_losses.CUSTOM_LOSS_MARK in request_id:
            return await self._in_thread(self._custom_loss, owner_id, request_id)
        return await self._in_thread(self._operation, owner_id, request_id, at_most)

    async def as_json(self, request_id: str, answer: Answer) -> Answer:
        """A protobuf result as JSON (WIRE §11), written away from the event loop and from the polls' threads."""
        write = sample_json if SAMPLE_MARK in request_id else forward_backward_json
        pieces = await to_thread.run_sync(lambda: write(b"".join(answer.pieces)), limiter=self._writers)
        return Answer("json", sum(map(len, pieces)), pieces)

    async def _in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await to_thread.run_sync(partial(function, *args, **kwargs), limiter=self._limiter)

    def _custom_loss(self, owner_id: str, request_id: str) -> Answer:
        with self._database.read() as session:
            outcome = custom_losses.outcome(session, owner_id, request_id)
        if outcome.error is not None:
            return Answer.of("error", error_payload(outcome.error, "user"))
        return Answer.of("json", outcome.result)

    def _operation(self, owner_id: str, request_id: str, at_most: int | None) -> Answer | None:
        with self._database.read() as session:
            row = session.execute(_FUTURE, {"request_id": request_id, "owner_id": owner_id}).one_or_none()
        if row is None:
            raise NotFound(f"request_id: there is no future {request_id!r}")
        if row.state == log.ACCEPTED:
            return None
        if row.state == log.FAILED:
            return Answer.of("error", error_payload(row.error or "failed", row.error_category or "unknown"))
        if row.result_kind is None:
            raise Gone(f"request_id: the result of {request_id!r} is no longer kept")
        kind: Literal["proto", "json"] = "proto" if row.result_kind == "proto" else "json"
        if row.result_blob is None:
            payload = row.result or b"{}"
            return Answer(kind, len(payload), () if at_most is not None and len(payload) > at_most else (payload,))
        try:
            if at_most is not None and (size := self._blobs.size(row.result_blob)) > at_most:
                return Answer(kind, size, ())
            return Answer.of(kind, self._blobs.get(row.result_blob))
        except BlobMissing as error:
            raise Gone(f"request_id: the result of {request_id!r} is no longer kept") from error

    async def find_finished(self, names: Sequence[str]) -> set[str]:
        """Which of these futures are finished; one query for training and one round trip for samples, at the same time.
        What a store that is away would know is left out. Whoever waits for a feed looks for himself, so every feed
        counts."""
        feeds = {name for name in names if name.startswith(FEED_MARK)}
        samples = [name for name in names if SAMPLE_MARK in name and name not in feeds]
        operations = [name for name in names if SAMPLE_MARK not in name and name not in feeds]
        looks: list[Awaitable[set[str]]] = []
        if samples:
            looks.append(self._samples.find_finished(samples))
        if operations:
            looks.append(self._in_thread(self._finished_operations, operations))
        return feeds.union(*await asyncio.gather(*map(_unless_away, looks)))

    def _finished_operations(self, request_ids: Sequence[str]) -> set[str]:
        with self._database.read() as session:
            return log.is_finished(session, request_ids)

    async def queue_state(self, request_id: str) -> QueueState:
        """Why a future has waited so long."""
        if SAMPLE_MARK in request_id:
            return await self._sample_state(await self._samples.place_of(request_id))
        model_id, _, seq = request_id.rpartition(":")
        run = await self._run_states.get(model_id, partial(self._in_thread, self._run_state, model_id))
        if run.awaited_seq is not None and run.awaited_seq < int(seq):
            return QueueState("active", f"seq_id {run.awaited_seq} of {model_id} has not arrived yet")
        state = await self._worker_state(run.pool, "train")
        if state.state == "active" and run.crowded_out is not None:
            return QueueState("paused_capacity", run.crowded_out)
        return state

    async def _sample_state(self, place: Place) -> QueueState:
        state = await self._worker_state(place.pool, "sample")
        if state.state != "active":
            return state
        return await self._refusals.get(place, partial(self._look_for_refusal, place))

    async def _look_for_refusal(self, place: Place) -> QueueState:
        full = await self._samples.refused(place)
        if full == "owner full":
            reason = f"{self._samples.most_of_an_owner} of your samples wait in pool {place.pool}, more are refused"
            return QueueState("paused_rate_limit", f"{reason} until some are done")
        if full == "pool full":
            return QueueState("paused_capacity", f"too many samples wait in pool {place.pool}; more are refused")
        return QueueState("active")

    def _run_state(self, model_id: str) -> _RunState:
        with self._database.read() as session:
            return _RunState(
                log.awaited_seq(session, model_id, _EVER),
                session.scalar(select(Run.pool).where(Run.id == model_id)),
                limits.why_it_waits(session, model_id, self._runs_per_tenant),
            )

    async def _worker_state(self, pool: str | None, role: str) -> QueueState:
        look = partial(self._in_thread, self._look_for_worker, pool, role)
        return await self._worker_states.get((pool, role), look)

    def _look_for_worker(self, pool: str | None, role: str) -> QueueState:
        query = select(Worker.roles, Worker.draining)
        query = query.where(Worker.pool == pool, Worker.last_seen > database_clock() - self._worker_silence_s)
        with self._database.read() as session:
            draining = [draining for roles, draining in session.execute(query) if role in roles]
        if not all(draining):
            return QueueState("active")
        if draining:
            reason = f"every {role} worker of pool {pool} is being emptied; the request waits for another"
            return QueueState("paused_capacity", reason)
        return QueueState("paused_capacity", f"no {role} worker of pool {pool} is alive; the request waits for one")
