"""What the fleet knows: which models are served, under which names, by which live workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import and_, delete, or_, select, update
from sqlalchemy.orm import Session

from app.db import Database, database_clock, utc_now
from app.fleet.models import Model, ModelName, Worker
from app.wire.types import ModelFacts


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A base model as one of its names: what checks and capabilities need."""

    name: str
    pool: str
    client_name: str
    tokenizer_id: str | None
    architecture: str
    vocab_size: int
    context_length: int
    tokenizer_blob: str | None = None


@dataclass(frozen=True, slots=True)
class NameOfModel:
    """A name to register: see `ModelName`."""

    name: str
    client_name: str
    tokenizer_id: str | None


def served_models(session: Session) -> list[ServedModel]:
    """Every name of every registered model."""
    query = select(ModelName, Model).join(Model, Model.pool == ModelName.pool).order_by(Model.pool, ModelName.position)
    return [_served(name, model) for name, model in session.execute(query)]


def roles_by_pool(session: Session) -> dict[str, set[str]]:
    """What each pool's workers do. One that died counts until its row is tidied away: it is expected back."""
    roles: dict[str, set[str]] = {}
    for pool, of_worker in session.execute(select(Worker.pool, Worker.roles)):
        roles.setdefault(pool, set()).update(of_worker)
    return roles


def find_model(session: Session, name: str) -> ServedModel | None:
    """The model that clients call `name`."""
    row = session.execute(
        select(ModelName, Model).join(Model, Model.pool == ModelName.pool).where(ModelName.name == name)
    ).one_or_none()
    return _served(*row) if row else None


def _served(name: ModelName, model: Model) -> ServedModel:
    return ServedModel(
        name=name.name,
        pool=model.pool,
        client_name=name.client_name,
        tokenizer_id=name.tokenizer_id,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        tokenizer_blob=model.tokenizer_blob,
    )


def register_model(
    session: Session,
    *,
    pool: str,
    source: str,
    facts: ModelFacts,
    names: Sequence[NameOfModel],
    tokenizer_blob: str | None = None,
) -> None:
    """Write what a worker has loaded. Names that this pool lost are dropped; a name moves to its newest pool."""
    model = session.get(Model, pool) or Model(pool=pool)
    model.source, model.architecture = source, facts.architecture
    model.vocab_size, model.context_length = facts.vocab_size, facts.context_length
    model.config_hash, model.updated_at = facts.config_hash, utc_now()
    model.tokenizer_blob = tokenizer_blob
    session.add(model)
    session.flush()
    session.execute(delete(ModelName).where(ModelName.pool == pool))
    session.execute(delete(ModelName).where(ModelName.name.in_([name.name for name in names])))
    for position, name in enumerate(names):
        session.add(
            ModelName(
                name=name.name,
                pool=pool,
                position=position,
                client_name=name.client_name,
                tokenizer_id=name.tokenizer_id,
            )
        )


def register_worker(
    session: Session,
    *,
    worker_id: str,
    pool: str,
    roles: Sequence[str],
    host: str,
    pid: int,
    slots: int,
    draining: bool = False,
) -> None:
    """Write a worker's row at its start, or anew when it was lost."""
    session.add(
        Worker(
            id=worker_id,
            pool=pool,
            roles=list(roles),
            host=host,
            pid=pid,
            slots=slots,
            phase="ready",
            draining=draining,
            last_seen=session.scalar(select(database_clock())),
        )
    )


def worker_seen(session: Session, worker_id: str, **values: object) -> bool | None:
    """Note that a worker lives, and what it is doing. Returns whether it shall drain; None if its row is gone."""
    query = update(Worker).where(Worker.id == worker_id).values(last_seen=database_clock(), **values)
    return session.scalar(query.returning(Worker.draining))


STOPPING = "stopping"
"""The phase of a worker that gives everything back and leaves."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a train worker has to do, by its row."""

    worker_id: str
    queued_tokens: int
    resident_runs: int
    slots: int


def trainers_with_room(session: Session, pool: str, *, besides: str, seen_within_s: float) -> list[Load]:
    """The other train workers of a pool that take runs and have a free slot, as far as they were seen lately."""
    query = select(Worker.id, Worker.queued_tokens, Worker.resident_runs, Worker.slots, Worker.roles).where(
        Worker.pool == pool,
        Worker.id != besides,
        Worker.draining.is_(False),
        Worker.phase != STOPPING,
        Worker.resident_runs < Worker.slots,
        Worker.last_seen > database_clock() - seen_within_s,
    )
    return [Load(*row[:4]) for row in session.execute(query) if "train" in row.roles]


def set_draining(session: Session, name: str, draining: bool) -> list[str]:
    """Ask workers to be empty, or to take work again: the one of that id, or all whose id begins with `name` or whose
    host it is. Returns their ids; they hear of it within a third of a lease."""
    chosen = or_(Worker.id.startswith(name, autoescape=True), Worker.host == name)
    query = update(Worker).where(chosen).values(draining=draining).returning(Worker.id)
    return sorted(session.scalars(query.execution_options(synchronize_session=False)))


def remove_worker(session: Session, worker_id: str) -> None:
    """Delete the row of a worker that stops on purpose."""
    session.execute(delete(Worker).where(Worker.id == worker_id))


def remove_all_workers(session: Session) -> None:
    """Forget every worker; for `tinworks up`, whose workers all died with its last run."""
    session.execute(delete(Worker))


def remove_dead_workers(session: Session, *, silent_for_s: float) -> list[str]:
    """Delete the rows of workers that were not seen for so long; returns their ids."""
    query = delete(Worker).where(Worker.last_seen < database_clock() - silent_for_s).returning(Worker.id)
    return list(session.scalars(query))


def missing_roles(database: Database, *, silence_s: float) -> list[str]:
    """What the fleet lacks, in words: a role of a pool that only silent or draining workers have, or no worker.
    `silence_s`: the setting `worker_silence_s`."""
    live: dict[tuple[str, str], bool] = {}
    with database.read() as session:
        heard = Worker.last_seen > database_clock() - silence_s
        alive = and_(heard, Worker.draining.is_(False)).label("alive")
        for pool, roles, is_alive in session.execute(select(Worker.pool, Worker.roles, alive)):
            for role in roles:
                live[pool, role] = live.get((pool, role), False) or bool(is_alive)
    if not live:
        return ["no worker has registered a model"]
    missing = [f"no live {role} worker for {pool}" for (pool, role), is_live in sorted(live.items()) if not is_live]
    for pool in sorted({pool for pool, _ in live}):
        missing += [f"no {role} worker for {pool}" for role in ("train", "sample") if (pool, role) not in live]
    return missing
