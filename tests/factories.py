"""Rows for tests: each function adds one, with what the test does not care about filled in, and returns it."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime

import numpy as np
from sqlalchemy.orm import Session

from app.accounts.models import Owner
from app.checkpoints.models import Checkpoint, Snapshot
from app.db import Database
from app.fleet.service import NameOfModel, register_model, register_worker
from app.runs import log
from app.runs.log import Failure, Payload
from app.runs.models import Run
from app.sampling.records import NewRecord, record, sequence_id
from app.sessions.models import ClientSession
from app.wire.sampling import encode_result
from app.wire.types import ModelFacts, SampledSequence, SampleResult

POOL = "tiny"
VOCABULARY = 64
CONTEXT = 32

_numbers = itertools.count()


def unique(prefix: str) -> str:
    """A name that no other row has."""
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


def add_owner(session: Session, *, id: str | None = None) -> Owner:
    identity = id or unique("owner")
    row = Owner(id=identity, name=identity)
    session.add(row)
    session.flush()
    return row


def add_model(session: Session, *, pool: str = POOL, names: Iterable[str] = ("tiny",)) -> None:
    register_model(
        session,
        pool=pool,
        source="/models/of/tests/tiny",
        facts=ModelFacts(
            architecture="TestForCausalLM", vocab_size=VOCABULARY, context_length=CONTEXT, config_hash="0" * 64
        ),
        names=[NameOfModel(name, name, None) for name in names],
    )


def add_worker(
    session: Session, *, id: str | None = None, pool: str = POOL, roles: Iterable[str] = ("train", "sample")
) -> str:
    identity = id or unique("worker")
    register_worker(session, worker_id=identity, pool=pool, roles=list(roles), host="test", pid=1, slots=4)
    session.flush()
    return identity


def add_session(session: Session, owner_id: str, **columns: object) -> ClientSession:
    row = ClientSession(id=str(uuid.uuid4()), owner_id=owner_id, **columns)
    session.add(row)
    session.flush()
    return row


def add_run(session: Session, owner_id: str, *, session_id: str | None = None, **columns: object) -> Run:
    """A run whose operation 0 has been applied."""
    session_id = session_id or add_session(session, owner_id).id
    number = next(_numbers)
    values: dict[str, object] = {
        "base_model": "tiny",
        "pool": POOL,
        "lora_rank": 4,
        "lora_alpha": 32.0,
        "lora_seed": 1,
        "optimizer": {"type": "adamw"},
        "applied_seq": 0,
    }
    row = Run(
        id=f"{session_id}:train:{number}",
        owner_id=owner_id,
        session_id=session_id,
        model_seq_id=number,
        **(values | columns),
    )
    session.add(row)
    session.flush()
    return row


def new_run(database: Database, **columns: object) -> Run:
    """A run, with an owner and a session of its own, committed."""
    with database.write() as session:
        return add_run(session, add_owner(session).id, **columns)


def add_operation(
    session: Session,
    model_id: str,
    seq_id: int,
    kind: str = "forward_backward",
    *,
    fingerprint: str = "f",
    body: bytes = b"body",
    body_blob: str | None = None,
    tokens: int = 0,
    failure: Failure | None = None,
) -> bool:
    payload = Payload(None, body_blob, len(body)) if body_blob else Payload(body, None, len(body))
    return log.append(
        session,
        model_id=model_id,
        seq_id=seq_id,
        kind=kind,
        fingerprint=fingerprint,
        body=payload,
        tokens=tokens,
        failure=failure,
    )


def add_checkpoint(
    session: Session,
    run: Run,
    name: str = "first",
    *,
    kind: str = "weights",
    expires_at: datetime | None = None,
    size_bytes: int = 1,
    **columns: object,
) -> Checkpoint:
    snapshot = Snapshot(
        id=uuid.uuid4().hex,
        owner_id=run.owner_id,
        model_id=run.id,
        seq_id=run.applied_seq,
        kind="state",
        size_bytes=size_bytes,
    )
    session.add(snapshot)
    session.flush()
    values: dict[str, object] = {"snapshot_id": snapshot.id, "expires_at": expires_at}
    row = Checkpoint(owner_id=run.owner_id, model_id=run.id, kind=kind, name=name, **(values | columns))
    session.add(row)
    session.flush()
    return row


def add_recorded_sample(
    session: Session,
    *,
    owner_id: str,
    session_id: str,
    prompt: Sequence[int],
    sequences: Sequence[tuple[Sequence[int], Sequence[float]]],
) -> list[str]:
    """A sample on record: `sequences` are tokens and logprobs. Returns the ids of its sequences."""
    request_id = f"{session_id}:sample:0:{next(_numbers)}"
    sampled = [
        SampledSequence("length", np.array(tokens, np.int32), np.array(logprobs, np.float32))
        for tokens, logprobs in sequences
    ]
    record(session, [NewRecord(request_id, owner_id, session_id, prompt, encode_result(SampleResult(sampled)))])
    return [sequence_id(request_id, i) for i in range(len(sequences))]
