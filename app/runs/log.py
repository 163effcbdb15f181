"""The operation log: every query on `operations`, for the API (append, look up) and for workers (read, finish).

The log is the truth. `(model_id, seq_id)` is unique, so an operation exists once however often it is sent; a worker
applies the contiguous prefix after `Run.applied_seq` and finishes it in the same transaction that moves `applied_seq`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import cast

import orjson
from sqlalchemy import Table, and_, bindparam, case, exists, func, insert, literal_column, select, update
from sqlalchemy.orm import Session, aliased

from app.db import utc_now
from app.errors import Category, ConflictingReplay
from app.runs.models import LOG_FORMAT, Operation, Run
from app.storage.blobs import BlobStore, new_blob_id

ACCEPTED, DONE, FAILED = "accepted", "done", "failed"
_operations = cast(Table, Operation.__table__)
_IS_ACCEPTED = Operation.state == literal_column("'accepted'")
"""A literal, not a parameter: only then may a database use the partial index."""
MISSING = "missing"
"""Kind of the failed operation in the place of one that never came. If it comes after all, that is its answer."""
_FILLED_AT_ONCE = 1000
"""Missing operations of one run."""
UNLOADED_SEQ = -1
"""`unload_model` has no place in the sequence: it is an operation before the first, done as soon as it is written."""


def request_id_of(model_id: str, seq_id: int) -> str:
    """The future of an operation: known from its key, so a repeated request has the same one."""
    return f"{model_id}:{seq_id}"


@dataclass(frozen=True, slots=True)
class Payload:
    """Bytes that live in the row when small and in the blob store when large."""

    inline: bytes | None
    blob: str | None
    size: int

    @classmethod
    def store(cls, data: bytes, blobs: BlobStore, *, folder: str, inline_bytes: int) -> Payload:
        """Store `data`: durable before any row names it."""
        if len(data) <= inline_bytes:
            return cls(data, None, len(data))
        key = f"{folder}/{new_blob_id()}"
        blobs.put(key, data)
        return cls(None, key, len(data))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an operation failed, as its client will read it."""

    message: str
    category: Category


def find(session: Session, model_id: str, seq_id: int) -> Operation | None:
    """The operation of that key."""
    return session.get(Operation, (model_id, seq_id))


_KNOWN = select(_operations.c.kind, _operations.c.fingerprint).where(
    _operations.c.model_id == bindparam("model_id"), _operations.c.seq_id == bindparam("seq_id")
)


def append(
    session: Session,
    *,
    model_id: str,
    seq_id: int,
    kind: str,
    fingerprint: str,
    body: Payload,
    tokens: int = 0,
    failure: Failure | None = None,
) -> bool:
    """Add an operation, accepted or, with `failure`, already failed: its place in the sequence is taken either way.

    Returns False if it was there before, or was given up as missing. Raises ConflictingReplay if another request was.
    """
    connection = session.connection()
    known = connection.execute(_KNOWN, {"model_id": model_id, "seq_id": seq_id}).one_or_none()
    if known is not None:
        if known.fingerprint != fingerprint and known.kind != MISSING:
            raise ConflictingReplay(
                f"seq_id: {seq_id} of {model_id!r} was already used by another {known.kind} request"
            )
        return False
    now = utc_now()
    row = {
        "model_id": model_id,
        "seq_id": seq_id,
        "request_id": request_id_of(model_id, seq_id),
        "kind": kind,
        "state": FAILED if failure else ACCEPTED,
        "format": LOG_FORMAT,
        "fingerprint": fingerprint,
        "tokens": tokens,
        "body": body.inline,
        "body_blob": body.blob,
        "body_bytes": body.size,
        "error": failure.message if failure else None,
        "error_category": failure.category if failure else None,
        "created_at": now,
        "finished_at": now if failure else None,
    }
    connection.execute(insert(_operations), row)
    return True


def unload(session: Session, model_id: str) -> None:
    """Note that a run takes no more operations; those that it has accepted still finish."""
    if find(session, model_id, UNLOADED_SEQ) is not None:
        return
    session.add(
        Operation(
            model_id=model_id,
            seq_id=UNLOADED_SEQ,
            request_id=request_id_of(model_id, UNLOADED_SEQ),
            kind="unload_model",
            state=DONE,
            fingerprint="",
            result=orjson.dumps({"type": "unload_model", "model_id": model_id}),
            result_kind="json",
            finished_at=utc_now(),
        )
    )


@dataclass(frozen=True, slots=True)
class Ready:
    """An operation as the planner sees it. `small_body`: its body, if that is so small that it came along. `pass_id`:
    the pass that has computed it."""

    model_id: str
    seq_id: int
    kind: str
    state: str
    tokens: int
    body_bytes: int
    small_body: bytes | None = field(default=None, compare=False, repr=False)
    pass_id: int | None = field(default=None, compare=False)

    @property
    def request_id(self) -> str:
        """Its future."""
        return request_id_of(self.model_id, self.seq_id)


_SMALL_BODY_BYTES = 1024
_READY = (
    Operation.model_id,
    Operation.seq_id,
    Operation.kind,
    Operation.state,
    Operation.tokens,
    Operation.body_bytes,
    case((Operation.body_bytes <= _SMALL_BODY_BYTES, Operation.body)),
    Operation.pass_id,
)
"""The columns of `Ready`, in its order."""


_next = aliased(Operation)
_PENDING = select(Run.id).where(
    Run.id.in_(select(Operation.model_id).where(_IS_ACCEPTED, Operation.format <= bindparam("newest"))),
    Run.pool == bindparam("pool"),
    exists().where(_next.model_id == Run.id, _next.seq_id == Run.applied_seq + 1, _next.format <= bindparam("newest")),
)
_NEWER = (
    select(Run.id)
    .join(Operation, and_(Operation.model_id == Run.id, Operation.seq_id == Run.applied_seq + 1))
    .where(Run.id.in_(bindparam("model_ids", expanding=True)), Operation.format > bindparam("newest"))
)
_CONTIGUOUS = (
    select(*_READY)
    .join(Run, Run.id == Operation.model_id)
    .where(
        Operation.model_id.in_(bindparam("model_ids", expanding=True)),
        Operation.seq_id > Run.applied_seq,
        Operation.seq_id <= Run.applied_seq + bindparam("limit"),
        Operation.format <= bindparam("newest"),
    )
    .order_by(Operation.model_id, Operation.seq_id)
)
_BODIES = select(Operation.model_id, Operation.seq_id, Operation.body, Operation.body_blob).where(
    Operation.request_id.in_(bindparam("request_ids", expanding=True))
)
# Built once: building a statement costs more than running it, and these run for every operation.


def pending_runs(session: Session, pool: str) -> set[str]:
    """Ids of the pool's runs that have work: accepted operations, and none missing before them. One whose next
    operation a newer release wrote has none for us."""
    return set(session.scalars(_PENDING, {"pool": pool, "newest": LOG_FORMAT}))


def runs_of_newer_releases(session: Session, model_ids: Iterable[str]) -> set[str]:
    """Those of the runs whose next operation only a newer release can read."""
    return set(session.scalars(_NEWER, {"model_ids": list(model_ids), "newest": LOG_FORMAT}))


def ready_operations(session: Session, positions: dict[str, int], *, limit: int = 256) -> dict[str, list[Ready]]:
    """For each run the contiguous operations after its position, in order, at most `limit`.

    `positions`: run id → last applied seq. Failed-on-arrival operations are included: they have to be consumed.
    """
    prefixes: dict[str, list[Ready]] = {model_id: [] for model_id in positions}
    values = {"model_ids": list(positions), "limit": limit, "newest": LOG_FORMAT}
    for row in session.execute(_CONTIGUOUS, values):
        prefix = prefixes[row.model_id]
        if row.seq_id == positions[row.model_id] + 1 + len(prefix):
            prefix.append(Ready(*row))
    return {model_id: prefix for model_id, prefix in prefixes.items() if prefix}


class NewerRelease(Exception):
    """Only a newer release than this one can read it: it is left to its workers."""


def applied_operations(session: Session, model_id: str, after: int, upto: int) -> list[Ready]:
    """The operations in (after, upto], to be replayed for their effect on the state. Raises NewerRelease."""
    query = (
        select(*_READY, Operation.format)
        .where(Operation.model_id == model_id, Operation.seq_id > after, Operation.seq_id <= upto)
        .order_by(Operation.seq_id)
    )
    rows = session.execute(query).all()
    if any(row.format > LOG_FORMAT for row in rows):
        raise NewerRelease(f"operations of {model_id} were written by a newer release")
    return [Ready(*row[:-1]) for row in rows]


def load_bodies(session: Session, blobs: BlobStore, operations: Iterable[Ready]) -> dict[tuple[str, int], bytes]:
    """Bodies of these operations. Raises BlobMissing."""
    bodies, others = {}, []
    for operation in operations:
        if operation.small_body is not None:
            bodies[operation.model_id, operation.seq_id] = operation.small_body
        else:
            others.append(request_id_of(operation.model_id, operation.seq_id))
    for row in session.execute(_BODIES, {"request_ids": others}) if others else ():
        bodies[row.model_id, row.seq_id] = blobs.get(row.body_blob) if row.body_blob else (row.body or b"")
    return bodies


@dataclass(frozen=True, slots=True)
class Finished:
    """What became of an operation: a result (`kind` `proto` or `json`), or a failure. `pass_id`: operations with the
    same one were computed together."""

    model_id: str
    seq_id: int
    result: Payload | None = None
    result_kind: str | None = None
    failure: Failure | None = None
    pass_id: int | None = None


_FINISHED_COLUMNS = (
    *("finished_at", "state", "error", "error_category"),
    *("result", "result_blob", "result_kind", "pass_id"),
)
_FINISH = (
    update(_operations)
    .where(_operations.c.request_id == bindparam("its_request_id"), _operations.c.state == ACCEPTED)
    .values({name: bindparam(name) for name in _FINISHED_COLUMNS})
)


def finish(session: Session, outcomes: Iterable[Finished]) -> None:
    """Write results and failures; operations that were finished before keep what they had."""
    now = utc_now()
    rows = [
        {
            "its_request_id": request_id_of(outcome.model_id, outcome.seq_id),
            "finished_at": now,
            "state": FAILED if outcome.failure else DONE,
            "error": outcome.failure.message if outcome.failure else None,
            "error_category": outcome.failure.category if outcome.failure else None,
            "result": outcome.result.inline if outcome.result else None,
            "result_blob": outcome.result.blob if outcome.result else None,
            "result_kind": outcome.result_kind,
            "pass_id": outcome.pass_id,
        }
        for outcome in outcomes
    ]
    if not rows:
        return
    session.connection().execute(_FINISH, rows)


def prune_bodies(session: Session, model_id: str, *, after: int, upto: int) -> list[str]:
    """Forget the bodies in (after, upto], which a durable snapshot covers. Returns the blobs to delete once this is
    committed.
    """
    covered = (Operation.model_id == model_id, Operation.seq_id > after, Operation.seq_id <= upto)
    blobs = list(session.scalars(select(Operation.body_blob).where(*covered, Operation.body_blob.is_not(None))))
    session.execute(update(Operation).where(*covered).values(body=None, body_blob=None))
    return [blob for blob in blobs if blob]


def fill_gaps(session: Session, *, older_than: timedelta) -> list[tuple[str, int]]:
    """Turn a sequence id that never came, while a later one has waited for `older_than`, into a failed operation.

    A gap that no client leaves, of millions, is not filled all at once. Returns the keys of the operations made.
    """
    first_waiting = (
        select(Operation.model_id, func.min(Operation.seq_id).label("seq_id"), Run.applied_seq)
        .join(Run, Run.id == Operation.model_id)
        .where(_IS_ACCEPTED, Operation.created_at < utc_now() - older_than)
        .where(Operation.seq_id > Run.applied_seq + 1)
        .group_by(Operation.model_id, Run.applied_seq)
    )
    made = []
    for model_id, waiting, applied in session.execute(first_waiting).all():
        query = select(Operation.seq_id).where(
            Operation.model_id == model_id, Operation.seq_id > applied, Operation.seq_id < waiting
        )
        there = set(session.scalars(query))
        missing = (seq_id for seq_id in range(applied + 1, waiting) if seq_id not in there)
        for seq_id in itertools.islice(missing, _FILLED_AT_ONCE):
            append(
                session,
                model_id=model_id,
                seq_id=seq_id,
                kind=MISSING,
                fingerprint="",
                body=Payload(b"", None, 0),
                failure=Failure(f"seq_id: {seq_id} never arrived, so the operations behind it went on", "user"),
            )
            made.append((model_id, seq_id))
    return made


def is_finished(session: Session, request_ids: Sequence[str]) -> set[str]:
    """Which of these futures are done or failed."""
    query = select(Operation.request_id).where(Operation.request_id.in_(request_ids), Operation.state != ACCEPTED)
    return set(session.scalars(query))


def awaited_seq(session: Session, model_id: str, seq_id: int) -> int | None:
    """The first sequence id before `seq_id` that has not arrived, if there is one."""
    applied = session.scalar(select(Run.applied_seq).where(Run.id == model_id))
    if applied is None:
        return None
    query = (
        select(Operation.seq_id)
        .where(Operation.model_id == model_id, Operation.seq_id > applied, Operation.seq_id < seq_id)
        .order_by(Operation.seq_id)
    )
    expected = applied + 1
    for arrived in session.scalars(query):
        if arrived != expected:
            break
        expected += 1
    return expected if expected < seq_id else None
