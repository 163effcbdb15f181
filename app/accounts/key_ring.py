"""The key ring: who asks, by the key or the token that came with the request. Consulted at every request."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.accounts.models import ApiKey, Owner
from app.accounts.service import KEY_PREFIX, hash_key
from app.accounts.tokens import TOKEN_PREFIX, TokenSigner
from app.db import Database
from app.errors import InvalidToken, Unauthorized
from app.settings import Settings

_OPEN_PREFIX = "open-"
_MAX_KEY_LENGTH = 512
_MAX_TOKEN_LENGTH = 8192
_MAX_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and by which key. On an open server keys have no row: `key_id` is None."""

    owner_id: str
    key_id: int | None


class KeyRing:
    """Finds the owner of a key or a token, remembering answers for `key_cache_s` so that polls cost no query."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._open = settings.auth == "open"
        self._ttl_s = settings.key_cache_s
        self._signer = TokenSigner(database, settings)
        self._known: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()

    # -- who asks

    def remembered(self, secret: str | None) -> str | None:
        """The owner's id, if this key or token was looked up a moment ago."""
        entry = self._known.get(hash_key(secret)) if secret else None
        return entry[1] if entry and entry[0] > time.monotonic() else None

    def look_up(self, secret: str | None) -> str:
        """The owner's id of a key or token. Raises Unauthorized with a text that says what to do."""
        caller, valid_s = self._identify(secret)
        assert secret is not None
        with self._lock:
            now = time.monotonic()
            if len(self._known) > _MAX_REMEMBERED:
                self._known = {k: v for k, v in self._known.items() if v[0] > now}
            self._known[hash_key(secret)] = (now + min(self._ttl_s, valid_s), caller.owner_id)
        return caller.owner_id

    def identify(self, secret: str | None) -> Caller:
        """Who asks, looked up in the database now. Raises Unauthorized."""
        return self._identify(secret)[0]

    def forget(self) -> None:
        """Forget all answers: a key was revoked."""
        with self._lock:
            self._known = {}

    def _identify(self, secret: str | None) -> tuple[Caller, float]:
        """The caller, and for how many seconds at most that may be believed."""
        if not secret:
            raise Unauthorized("X-API-Key: missing; set TINKER_API_KEY")
        if secret.startswith(TOKEN_PREFIX) and len(secret) <= _MAX_TOKEN_LENGTH:
            return self._by_token(secret)
        if not secret.startswith(KEY_PREFIX) or len(secret) > _MAX_KEY_LENGTH:
            raise Unauthorized("X-API-Key: not a Tinworks key; one starts with 'tml-'")
        digest = hash_key(secret)
        return (self._by_open_key(digest) if self._open else self._by_key(digest)), self._ttl_s

    # -- by key

    def _by_key(self, digest: str) -> Caller:
        query = select(ApiKey.owner_id, ApiKey.id).where(ApiKey.key_hash == digest, ApiKey.revoked_at.is_(None))
        with self._database.read() as session:
            row = session.execute(query).one_or_none()
        if row is None:
            raise Unauthorized("X-API-Key: this key is unknown or was revoked; `tinworks keys create` makes one")
        return Caller(row.owner_id, row.id)

    def _by_open_key(self, digest: str) -> Caller:
        owner_id = _OPEN_PREFIX + digest[:32]
        with self._database.read() as session:
            if session.get(Owner, owner_id) is not None:
                return Caller(owner_id, None)
        with contextlib.suppress(IntegrityError):  # then another first request of this key has made it
            with self._database.write() as session:
                _add_owner(session, owner_id)
        return Caller(owner_id, None)

    # -- by token

    def exchange(self, secret: str | None) -> str:
        """A token for a key; for a token that token, so that none is prolonged without its key. Raises Unauthorized."""
        caller = self.identify(secret)
        assert secret is not None
        if secret.startswith(TOKEN_PREFIX):
            return secret
        with self._database.read() as session:
            name = session.get_one(Owner, caller.owner_id).name
        return self._signer.sign(owner_id=caller.owner_id, owner_name=name, key_id=caller.key_id)

    def _by_token(self, secret: str) -> tuple[Caller, float]:
        token = self._signer.read(secret)
        known = self._open_token_holds(token.owner_id) if self._open else self._key_holds(token.owner_id, token.key_id)
        if not known or self._open != (token.key_id is None):
            raise InvalidToken("X-API-Key: the key of this token was revoked, or is not one of this server")
        return Caller(token.owner_id, token.key_id), token.expires_at - time.time()

    def _key_holds(self, owner_id: str, key_id: int | None) -> bool:
        query = select(ApiKey.id).where(ApiKey.id == key_id, ApiKey.owner_id == owner_id, ApiKey.revoked_at.is_(None))
        with self._database.read() as session:
            return session.scalar(query) is not None

    def _open_token_holds(self, owner_id: str) -> bool:
        with self._database.read() as session:
            return owner_id.startswith(_OPEN_PREFIX) and session.get(Owner, owner_id) is not None


def _add_owner(session: Session, owner_id: str) -> None:
    if session.get(Owner, owner_id) is None:
        session.add(Owner(id=owner_id, name=owner_id))
