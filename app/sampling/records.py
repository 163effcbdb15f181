"""Samples on record: what was sampled, with its logprobs, for training requests that name it (WIRE §5.5, SEMANTICS §3).

A sample is recorded whole, under its request id, before its client can see it, and the first record stays: a sampler
that draws the same sample again, because another one died or was slow, delivers what is on record and not what it drew.
So a record and what its client holds are the same bytes.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from app.db import utc_now
from app.sampling.models import RecordedSample
from app.wire import tinker_pb2 as pb

_LOOK_UP_AT_ONCE = 500
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSequence:
    """One sampled sequence. `tokens` int32 [S] and `logprobs` float32 [S], untempered, as its client got them; `prompt`
    int32 [P]: the tokens that it continues."""

    sequence_id: str
    tokens: np.ndarray
    logprobs: np.ndarray
    prompt: np.ndarray


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A finished sample that goes on record. `response`: its encoded SampleResponse."""

    request_id: str
    owner_id: str
    session_id: str
    prompt: Sequence[int]
    response: bytes


def sequence_id(request_id: str, index: int) -> str:
    """The name of a sample's sequence, known from its submission on."""
    return f"{request_id}:{index}"


def find_recorded(
    session: Session, *, owner_id: str, session_id: str, sequence_ids: Collection[str]
) -> dict[str, RecordedSequence]:
    """Those of the sequences that are on record for this owner and session, by their id."""
    wanted: dict[str, list[int]] = defaultdict(list)
    for identity in set(sequence_ids):
        request_id, _, number = identity.rpartition(":")
        if not _NUMBER.fullmatch(number) or "\0" in identity:  # which no database takes
            continue
        wanted[request_id].append(int(number))
    ids = sorted(wanted)
    found = {}
    for start in range(0, len(ids), _LOOK_UP_AT_ONCE):
        query = select(RecordedSample.request_id, RecordedSample.prompt, RecordedSample.response).where(
            RecordedSample.request_id.in_(ids[start : start + _LOOK_UP_AT_ONCE]),
            RecordedSample.owner_id == owner_id,
            RecordedSample.session_id == session_id,
        )
        for request_id, prompt, response in session.execute(query):
            for sequence in _sequences(request_id, prompt, response, wanted[request_id]):
                found[sequence.sequence_id] = sequence
    return found


def record(session: Session, samples: Iterable[NewRecord]) -> dict[str, bytes | None]:
    """Put samples on record, and return for each what its client has to get: its own response, or an earlier one that
    is on record under the same request id; None if that one answers another prompt."""
    new = {sample.request_id: sample for sample in samples}
    if not new:
        return {}
    rows = [
        {
            "request_id": request_id,
            "owner_id": sample.owner_id,
            "session_id": sample.session_id,
            "prompt": _packed(sample.prompt),
            "response": sample.response,
            "created_at": utc_now(),
        }
        for request_id, sample in sorted(new.items())
    ]
    is_sqlite = session.get_bind().dialect.name == "sqlite"
    insert = (sqlite.insert if is_sqlite else postgresql.insert)(RecordedSample)
    statement = insert.on_conflict_do_nothing().returning(RecordedSample.request_id)
    added = set(session.scalars(statement, rows))
    answers: dict[str, bytes | None] = {request_id: new[request_id].response for request_id in added}
    earlier = select(RecordedSample).where(RecordedSample.request_id.in_(sorted(new.keys() - added)))
    for row in session.scalars(earlier) if len(added) < len(new) else ():
        sample = new[row.request_id]
        same = (row.owner_id, row.prompt) == (sample.owner_id, _packed(sample.prompt))
        answers[row.request_id] = row.response if same else None
    return answers


def forget_recorded(session: Session, *, before: datetime, limit: int) -> int:
    """Drop samples that went on record before a time, oldest first, so many at most; returns how many."""
    old = (
        select(RecordedSample.request_id)
        .where(RecordedSample.created_at < before)
        .order_by(RecordedSample.created_at)
        .limit(limit)
    )
    gone = session.execute(delete(RecordedSample).where(RecordedSample.request_id.in_(old)))
    return int(gone.rowcount)  # type: ignore[attr-defined]


def _packed(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<i4").tobytes()


def _sequences(request_id: str, prompt: bytes, response: bytes, indexes: Iterable[int]) -> list[RecordedSequence]:
    sequences = pb.SampleResponse.FromString(response).sequences
    tokens_P = np.frombuffer(prompt, "<i4")
    return [
        RecordedSequence(
            sequence_id(request_id, i),
            np.frombuffer(sequences[i].tokens, "<i4"),
            np.frombuffer(sequences[i].logprobs, "<f4"),
            tokens_P,
        )
        for i in indexes
        if i < len(sequences)
    ]
