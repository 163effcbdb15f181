"""What waits, what runs, and where: read by `tinworks runs`, `tinworks workers` and the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import func, literal_column, or_, select
from sqlalchemy.orm import Session

from app.accounts.models import Owner
from app.db import database_clock, utc_now
from app.fleet.models import Worker
from app.runs.limits import why_it_waits
from app.runs.log import UNLOADED_SEQ, awaited_seq
from app.runs.models import Operation, Run
from app.sessions.models import ClientSession

_ACCEPTED = Operation.state == literal_column("'accepted'")
_EVER = 2**31 - 1
_SILENT = "silent"
"""The state of a worker that does not count as live."""


@dataclass(frozen=True, slots=True)
class PoolQueue:
    """The training of one pool: accepted operations, the age of the oldest, the runs that have some and no worker, and
    the runs that workers hold."""

    pool: str
    operations: int
    age_s: float
    runs_without_worker: int
    runs_held: int


def training_queues(session: Session) -> list[PoolQueue]:
    """What waits in each pool that has runs with work or a worker."""
    waiting = (
        select(Operation.model_id, func.count().label("operations"), func.min(Operation.created_at).label("since"))
        .where(_ACCEPTED)
        .group_by(Operation.model_id)
        .subquery()
    )
    is_alone = Run.worker_id.is_(None)
    query = (
        select(Run.pool, is_alone, func.count(), func.sum(waiting.c.operations), func.min(waiting.c.since))
        .join(waiting, waiting.c.model_id == Run.id)
        .where(Run.pool.is_not(None))
        .group_by(Run.pool, is_alone)
    )
    pools: dict[str | None, dict[str, Any]] = {}
    for pool, alone, runs, operations, since in session.execute(query):
        mine = pools.setdefault(pool, {"operations": 0, "age_s": 0.0, "alone": 0})
        mine["operations"] += int(operations)
        mine["age_s"] = max(mine["age_s"], _age_s(since))
        mine["alone"] += runs if alone else 0
    held = dict(session.execute(_HELD).tuples().all())
    nothing = {"operations": 0, "age_s": 0.0, "alone": 0}
    return [
        PoolQueue(
            pool,
            operations=pools.get(pool, nothing)["operations"],
            age_s=pools.get(pool, nothing)["age_s"],
            runs_without_worker=pools.get(pool, nothing)["alone"],
            runs_held=held.get(pool, 0),
        )
        for pool in sorted(name for name in pools.keys() | held.keys() if name is not None)
    ]


_HELD = select(Run.pool, func.count()).where(Run.worker_id.is_not(None), Run.pool.is_not(None)).group_by(Run.pool)


def _age_s(since: datetime | None) -> float:
    return max(0.0, (utc_now() - since).total_seconds()) if since else 0.0


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A worker's row, and whether it was heard of lately. `state`: `silent`, `draining`, `drained`, or its phase."""

    id: str
    pool: str
    roles: tuple[str, ...]
    host: str
    pid: int
    state: str
    slots: int
    resident_runs: int
    queued_tokens: int
    silent_s: float
    started_at: datetime
    packed: list[dict[str, Any]]

    @property
    def is_alive(self) -> bool:
        """Whether it counts as live."""
        return self.state != _SILENT


def seen_workers(session: Session, pool: str | None = None, *, silence_s: float) -> list[SeenWorker]:
    """Every worker that has registered and not left, of all pools or one. `silence_s`: the setting
    `worker_silence_s`."""
    query = select(Worker, (database_clock() - Worker.last_seen).label("silent_s")).order_by(Worker.pool, Worker.id)
    if pool is not None:
        query = query.where(Worker.pool == pool)
    return [_seen(worker, max(0.0, float(silent_s)), silence_s) for worker, silent_s in session.execute(query)]


def _seen(worker: Worker, silent_s: float, silence_s: float) -> SeenWorker:
    state = worker.phase
    if silent_s > silence_s:
        state = _SILENT
    elif worker.draining and state != "drained":
        state = "draining"
    return SeenWorker(
        id=worker.id,
        pool=worker.pool,
        roles=tuple(worker.roles),
        host=worker.host,
        pid=worker.pid,
        state=state,
        slots=worker.slots,
        resident_runs=worker.resident_runs,
        queued_tokens=worker.queued_tokens,
        silent_s=silent_s,
        started_at=worker.started_at,
        packed=(worker.detail or {}).get("metrics", []),
    )


@dataclass(frozen=True, slots=True)
class SeenRun:
    """A run, its place, and why it is there. `state`: `training` (it has work and a worker), `waiting` (work, but
    nobody who does it), `resident` (a worker, no work), `idle`, `failed` or `unloaded`."""

    id: str
    owner: str
    base_model: str
    pool: str | None
    lora_rank: int
    state: str
    why: str
    worker_id: str | None
    applied_seq: int
    operations: int
    age_s: float
    last_request_at: datetime


def seen_runs(
    session: Session,
    *,
    silence_s: float,
    owner: str | None = None,
    idle: bool = False,
    limit: int = 200,
    runs_per_tenant: int = 0,
) -> list[SeenRun]:
    """Runs that work or wait, those that wait longest first; with `idle` also those that do neither, the newest first.
    `owner`: only those of the tenant of this name or id. `silence_s`, `runs_per_tenant`: the settings
    `worker_silence_s` and `runs_per_tenant`."""
    waiting = (
        select(Operation.model_id, func.count().label("operations"), func.min(Operation.created_at).label("since"))
        .where(_ACCEPTED)
        .group_by(Operation.model_id)
        .subquery()
    )
    query = (
        select(Run, Owner.name, ClientSession.finished_at, waiting.c.operations, waiting.c.since)
        .join(Owner, Owner.id == Run.owner_id)
        .join(ClientSession, ClientSession.id == Run.session_id)
        .join(waiting, waiting.c.model_id == Run.id, isouter=True)
        .where(Run.copied_from.is_(None))
        .order_by(waiting.c.since.is_(None), waiting.c.since, Run.last_request_at.desc())
        .limit(limit)
    )
    if owner is not None:
        query = query.where(or_(Owner.name == owner, Owner.id == owner))
    if not idle:
        query = query.where(or_(waiting.c.operations.is_not(None), Run.worker_id.is_not(None)))
    workers = {worker.id: worker for worker in seen_workers(session, silence_s=silence_s)}
    return [_placed(session, row, workers, runs_per_tenant) for row in session.execute(query).all()]


def _placed(session: Session, row: Any, workers: dict[str, SeenWorker], most: int) -> SeenRun:
    run, owner, finished_at, operations, since = row
    state, why = _state(session, run, finished_at, operations or 0, workers, most)
    return SeenRun(
        id=run.id,
        owner=owner,
        base_model=run.base_model,
        pool=run.pool,
        lora_rank=run.lora_rank,
        state=state,
        why=why,
        worker_id=run.worker_id,
        applied_seq=run.applied_seq,
        operations=operations or 0,
        age_s=_age_s(since),
        last_request_at=run.last_request_at,
    )


def _state(
    session: Session,
    run: Run,
    finished_at: datetime | None,
    operations: int,
    workers: dict[str, SeenWorker],
    most: int,
) -> tuple[str, str]:
    if run.failed:
        return "failed", "its creation failed"
    holder = workers.get(run.worker_id or "")
    if not operations:
        if run.worker_id:
            return "resident", "has a slot and no work"
        if finished_at is not None:
            return "idle", "its session has finished"
        unloaded = session.get(Operation, (run.id, UNLOADED_SEQ)) is not None
        return ("unloaded", "its client has unloaded it") if unloaded else ("idle", "")
    awaited = awaited_seq(session, run.id, _EVER)
    last = session.scalar(select(func.max(Operation.seq_id)).where(Operation.model_id == run.id, _ACCEPTED))
    if awaited is not None and last is not None and awaited == run.applied_seq + 1 and awaited < last:
        return "waiting", f"sequence id {awaited} has not arrived"
    if holder is not None and not holder.is_alive:
        return "waiting", f"worker {holder.id} is silent; its lease runs out"
    if run.worker_id:
        return "training", "" if not run.crash_count else f"alone in its passes: {run.crash_count} workers died of it"
    return "waiting", why_it_waits(session, run.id, most) or _why_without_worker(run, workers)


def _why_without_worker(run: Run, workers: dict[str, SeenWorker]) -> str:
    trainers = [worker for worker in workers.values() if worker.pool == run.pool and "train" in worker.roles]
    alive = [worker for worker in trainers if worker.is_alive]
    taking = [worker for worker in alive if worker.state not in ("draining", "drained")]
    if not alive:
        return f"no train worker of pool {run.pool} is alive"
    if not taking:
        return f"all train workers of pool {run.pool} are draining"
    if all(worker.resident_runs >= worker.slots for worker in taking):
        return f"all {sum(worker.slots for worker in taking)} slots of pool {run.pool} are taken by runs with work"
    return "is about to be taken"
