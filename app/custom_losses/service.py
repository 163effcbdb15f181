"""Uploading losses, and finding them again: as a future, and by a `forward_backward` that names one."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from sqlalchemy import delete, func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.custom_losses.allowed import MAX_LOSSES_PER_SESSION
from app.custom_losses.graph import LossGraph, encode, parse
from app.custom_losses.models import CustomLoss
from app.custom_losses.schemas import CreateCustomLoss, CustomLossCreated
from app.db import Database
from app.errors import ConflictingReplay, InvalidRequest, NotFound
from app.runs.requests import fingerprint, readable, validate
from app.sessions.models import ClientSession
from app.sessions.service import require_live

CUSTOM_LOSS_MARK = ":custom_loss:"
_PARSED = 256
_LOSS_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Found:
    """A stored loss: its canonical text, and what that says."""

    text: str
    graph: LossGraph


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of an upload: the JSON of its result, or an error."""

    result: bytes
    error: str | None


def create(database: Database, owner_id: str, data: object) -> str:
    """`create_custom_loss`: store a loss, or the reason why it cannot be one. Returns the future's id.

    Raises InvalidRequest if the session and the number cannot be read, NotFound, Gone, or ConflictingReplay if the
    number was used for another upload.
    """
    session_id, seq_id = readable(data, "session_id", "custom_loss_seq_id", 0)
    assert isinstance(data, dict)
    mark = fingerprint(data)
    text, refusal = None, None
    try:
        text = _canonical(data)
    except InvalidRequest as error:
        refusal = error.detail
    row = CustomLoss(
        id=uuid.uuid4().hex,
        owner_id=owner_id,
        session_id=session_id,
        seq_id=seq_id,
        fingerprint=mark,
        graph=text,
        error=refusal,
    )
    try:
        _add(database, row)
    except IntegrityError:  # the same upload came twice at once; the other one is stored now
        _add(database, row)
    return f"{session_id}{CUSTOM_LOSS_MARK}{seq_id}"


def _canonical(data: dict[str, Any]) -> str:
    request = validate(CreateCustomLoss, data)
    text = encode(request.name, request.inputs, request.graph)
    parse(text)
    return text


def _add(database: Database, row: CustomLoss) -> None:
    with database.write() as session:
        require_live(session, row.owner_id, row.session_id)
        known = session.scalar(
            select(CustomLoss.fingerprint).where(
                CustomLoss.session_id == row.session_id, CustomLoss.seq_id == row.seq_id
            )
        )
        if known is not None:
            if known != row.fingerprint:
                raise ConflictingReplay(f"custom_loss_seq_id: {row.seq_id} was already used for another loss")
            return
        count = session.scalar(select(func.count()).where(CustomLoss.session_id == row.session_id)) or 0
        if count >= MAX_LOSSES_PER_SESSION:
            raise InvalidRequest(f"session_id: the session has {count} custom losses, which is the limit")
        session.add(row)


def outcome(session: Session, owner_id: str, request_id: str) -> Outcome:
    """What became of an upload of the owner. Raises NotFound."""
    session_id, _, number = request_id.rpartition(CUSTOM_LOSS_MARK)
    seq_id = int(number) if number.isascii() and number.isdigit() and len(number) < 11 else -1
    row = session.scalar(
        select(CustomLoss).where(
            CustomLoss.session_id == session_id, CustomLoss.seq_id == seq_id, CustomLoss.owner_id == owner_id
        )
    )
    if row is None:
        raise NotFound(f"request_id: there is no future {request_id!r}")
    return Outcome(CustomLossCreated(loss_id=row.id).model_dump_json().encode(), row.error)


def find(session: Session, owner_id: str, loss_id: object) -> Found:
    """The owner's loss. Raises InvalidRequest."""
    if not isinstance(loss_id, str):
        raise InvalidRequest("loss_fn_config['loss_id']: missing; custom needs the id of an uploaded loss")
    query = select(CustomLoss.graph).where(CustomLoss.id == loss_id, CustomLoss.owner_id == owner_id)
    text = session.scalar(query) if _LOSS_ID.fullmatch(loss_id) else None
    if text is None:
        raise InvalidRequest(f"loss_fn_config['loss_id']: there is no custom loss {loss_id[:64]!r}")
    return Found(text, _parsed(text))


def forget_losses(session: Session, *, gone_before: datetime) -> None:
    """Drop the losses of sessions that ended, or fell silent, before a time: no request can name them any more."""
    ended = or_(ClientSession.finished_at < gone_before, ClientSession.silent_since < gone_before)
    old = select(ClientSession.id).where(ended)
    session.execute(delete(CustomLoss).where(CustomLoss.session_id.in_(old)))


@lru_cache(maxsize=_PARSED)
def _parsed(text: str) -> LossGraph:
    return parse(text)
