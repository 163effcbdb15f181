"""What a future has become: pending, a result, or a failure (WIRE §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import orjson
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool

from app.db import Database, database_clock
from app.errors import Gone, NotFound
from app.fleet.models import Worker
from app.fleet.service import WORKER_SILENCE_S
from app.runs import log
from app.runs.models import Operation, Run
from app.sampling.service import SAMPLE_MARK, SamplingService
from app.storage.blobs import BlobMissing, BlobStore


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished future: protobuf bytes, JSON bytes, or the JSON of an error."""

    kind: Literal["proto", "json", "error"]
    payload: bytes


@dataclass(frozen=True, slots=True)
class QueueState:
    """Why a future is still pending, for `try_again`."""

    state: Literal["active", "paused_capacity", "paused_rate_limit"]
    reason: str | None = None


def error_payload(message: str, category: str) -> bytes:
    """The JSON body of a failed future."""
    return orjson.dumps({"error": message, "category": category})


class FutureService:
    """Looks futures up, of training (the log) and of sampling (Redis)."""

    def __init__(self, database: Database, blobs: BlobStore, sampling: SamplingService) -> None:
        self._database = database
        self._blobs = blobs
        self._sampling = sampling

    async def look_up(self, owner_id: str, request_id: str) -> Answer | None:
        """What the owner's future has become; None while it is pending. Raises NotFound, or Gone for a lost sample."""
        if SAMPLE_MARK in request_id:
            found = await self._sampling.look_up(owner_id, request_id)
            return Answer(*found) if found else None
        return await run_in_threadpool(self._operation, owner_id, request_id)

    def _operation(self, owner_id: str, request_id: str) -> Answer | None:
        query = (
            select(Operation)
            .join(Run, Run.id == Operation.model_id)
            .where(Operation.request_id == request_id, Run.owner_id == owner_id)
        )
        with self._database.read() as session:
            row = session.scalar(query)
        if row is None:
            raise NotFound(f"request_id: there is no future {request_id!r}")
        if row.state == log.ACCEPTED:
            return None
        if row.state == log.FAILED:
            return Answer("error", error_payload(row.error or "failed", row.error_category or "unknown"))
        if row.result_kind is None:
            raise Gone(f"request_id: the result of {request_id!r} is no longer kept")
        try:
            payload = self._blobs.get(row.result_blob) if row.result_blob else row.result
        except BlobMissing as error:
            raise Gone(f"request_id: the result of {request_id!r} is no longer kept") from error
        return Answer("proto" if row.result_kind == "proto" else "json", payload or b"{}")

    async def find_finished(self, request_ids: Sequence[str]) -> set[str]:
        """Which of these futures are finished; one query for training, one round trip for samples."""
        samples = [request_id for request_id in request_ids if SAMPLE_MARK in request_id]
        operations = [request_id for request_id in request_ids if SAMPLE_MARK not in request_id]
        finished = await self._sampling.find_finished(samples) if samples else set()
        if operations:
            finished |= await run_in_threadpool(self._finished_operations, operations)
        return finished

    def _finished_operations(self, request_ids: Sequence[str]) -> set[str]:
        with self._database.read() as session:
            return log.is_finished(session, request_ids)

    async def queue_state(self, request_id: str) -> QueueState:
        """Why a future has waited so long."""
        if SAMPLE_MARK in request_id:
            session_id = request_id.rpartition(":")[0]
            pool = await self._sampling.pool_of(session_id)
            return await run_in_threadpool(self._worker_state, pool, "sample")
        return await run_in_threadpool(self._operation_state, request_id)

    def _operation_state(self, request_id: str) -> QueueState:
        model_id, _, seq = request_id.rpartition(":")
        with self._database.read() as session:
            awaited = log.awaited_seq(session, model_id, int(seq))
            pool = session.scalar(select(Run.pool).where(Run.id == model_id))
        if awaited is not None:
            return QueueState("active", f"seq_id {awaited} of {model_id} has not arrived yet")
        return self._worker_state(pool, "train")

    def _worker_state(self, pool: str | None, role: str) -> QueueState:
        query = select(Worker.roles).where(Worker.pool == pool, Worker.last_seen > database_clock() - WORKER_SILENCE_S)
        with self._database.read() as session:
            if any(role in roles for roles in session.scalars(query)):
                return QueueState("active")
        return QueueState("paused_capacity", f"no {role} worker of pool {pool} is alive; the request waits for one")
