"""Exported traces: a signed URL that needs no key, and the timeline behind it, made when it is fetched."""

from __future__ import annotations

import time
from functools import cached_property
from urllib.parse import quote

import jwt
from sqlalchemy import bindparam, select

from app.accounts.secret import derived_key
from app.db import Database, utc_now
from app.errors import Forbidden, NotFound
from app.runs.models import Operation, Run
from app.sessions.models import ClientSession
from app.sessions.timeline import Step, encode_trace
from app.settings import Settings

ROUTE = "/api/v1/traces"
_ALGORITHM = "HS256"
_RUNS = select(Run.id).where(Run.session_id == bindparam("session_id")).order_by(Run.model_seq_id)
_STEPS = (
    select(
        Operation.seq_id,
        Operation.kind,
        Operation.state,
        Operation.tokens,
        Operation.error,
        Operation.created_at,
        Operation.finished_at,
    )
    .where(Operation.model_id == bindparam("model_id"))
    .order_by(Operation.created_at, Operation.seq_id)
)
"""In the order of `Step`'s fields."""


class Traces:
    """Traces of one API process, and the signed URLs that lead to them without a key."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    @cached_property
    def _key(self) -> bytes:
        return derived_key(self._database, self._settings, "trace links")

    def url(self, owner_id: str, session_id: str, base_url: str) -> str:
        """A URL, valid for `download_url_ttl_s`, of the trace of the owner's session; `base_url`: how the client
        reaches us. Raises NotFound."""
        query = select(ClientSession.id).where(ClientSession.id == session_id, ClientSession.owner_id == owner_id)
        with self._database.read() as session:
            if session.scalar(query) is None:
                raise NotFound(f"session_id: there is no session {session_id!r}")
        claims = {"exp": int(time.time()) + self._settings.download_url_ttl_s, "session": session_id}
        token = jwt.encode(claims, self._key, algorithm=_ALGORITHM)
        base = (self._settings.public_url or base_url).rstrip("/")
        return f"{base}{ROUTE}/{token}/{quote(session_id)}.pftrace"

    def read(self, token: str) -> bytes:
        """The trace that a URL's token leads to, as of now. Raises Forbidden for a token that is not valid."""
        try:
            claims = jwt.decode(token, self._key, algorithms=[_ALGORITHM], options={"require": ["exp", "session"]})
        except jwt.InvalidTokenError as error:
            raise Forbidden("this link has expired, or was not signed by this server; ask for a new one") from error
        session_id = claims["session"]
        with self._database.read() as session:
            began = session.scalar(select(ClientSession.created_at).where(ClientSession.id == session_id))
            if began is None:
                raise NotFound(f"session_id: there is no session {session_id!r}")
            model_ids = session.scalars(_RUNS, {"session_id": session_id}).all()
            runs = [
                (model_id, [Step(*row) for row in session.execute(_STEPS, {"model_id": model_id})])
                for model_id in model_ids
            ]
        return encode_trace(began, utc_now(), runs)
