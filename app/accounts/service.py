"""Keys and owners: made, listed, revoked, and looked up at every request."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
import uuid

from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from app.accounts.models import ApiKey, Owner
from app.db import Database, get_database, utc_now
from app.errors import Unauthorized
from app.settings import Settings

KEY_PREFIX = "tml-"
_MAX_KEY_LENGTH = 512


def hash_key(secret: str) -> str:
    """What is stored of a key."""
    return hashlib.sha256(secret.encode()).hexdigest()


def create_key(owner_name: str, name: str = "") -> tuple[ApiKey, str]:
    """Make a key for the owner of that name (made too, if new). Returns the row and the secret, shown this once."""
    secret = KEY_PREFIX + secrets.token_urlsafe(32)
    with get_database().write() as session:
        owner = session.scalar(select(Owner).where(Owner.name == owner_name))
        if owner is None:
            owner = Owner(id=uuid.uuid4().hex, name=owner_name)
            session.add(owner)
            session.flush()
        key = ApiKey(owner_id=owner.id, name=name, prefix=secret[:8], key_hash=hash_key(secret))
        session.add(key)
    return key, secret


def list_keys(owner_name: str | None = None) -> list[tuple[ApiKey, Owner]]:
    """All keys with their owners, revoked ones too, oldest first."""
    query = select(ApiKey, Owner).join(Owner, Owner.id == ApiKey.owner_id).order_by(ApiKey.id)
    if owner_name is not None:
        query = query.where(Owner.name == owner_name)
    with get_database().read() as session:
        return [(key, owner) for key, owner in session.execute(query)]


def revoke_key(key_id: int) -> bool:
    """Revoke a key. False if there is none of that id, or it was revoked before."""
    with get_database().write() as session:
        query = update(ApiKey).where(ApiKey.id == key_id, ApiKey.revoked_at.is_(None)).values(revoked_at=utc_now())
        return session.execute(query).rowcount == 1  # type: ignore[attr-defined, no-any-return]


class KeyRing:
    """Finds the owner of a key, remembering answers for `key_cache_s` so that polls cost no query."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._open = settings.auth == "open"
        self._ttl_s = settings.key_cache_s
        self._known: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()

    def remembered(self, secret: str | None) -> str | None:
        """The owner's id, if this key was looked up a moment ago."""
        entry = self._known.get(hash_key(secret)) if secret else None
        return entry[1] if entry and entry[0] > time.monotonic() else None

    def look_up(self, secret: str | None) -> str:
        """The owner's id of a key. Raises Unauthorized with a text that says what to do."""
        if not secret:
            raise Unauthorized("X-API-Key: missing; set TINKER_API_KEY")
        if not secret.startswith(KEY_PREFIX) or len(secret) > _MAX_KEY_LENGTH:
            raise Unauthorized("X-API-Key: not a Tinworks key; one starts with 'tml-'")
        digest = hash_key(secret)
        owner_id = self._open_owner(digest) if self._open else self._key_owner(digest)
        with self._lock:
            now = time.monotonic()
            if len(self._known) > 10_000:
                self._known = {k: v for k, v in self._known.items() if v[0] > now}
            self._known[digest] = (now + self._ttl_s, owner_id)
        return owner_id

    def _key_owner(self, digest: str) -> str:
        query = select(ApiKey.owner_id).where(ApiKey.key_hash == digest, ApiKey.revoked_at.is_(None))
        with self._database.read() as session:
            owner_id = session.scalar(query)
        if owner_id is None:
            raise Unauthorized("X-API-Key: this key is unknown or was revoked; `tinworks keys create` makes one")
        return owner_id

    def _open_owner(self, digest: str) -> str:
        owner_id = f"open-{digest[:32]}"
        with self._database.read() as session:
            if session.get(Owner, owner_id) is not None:
                return owner_id
        with contextlib.suppress(IntegrityError):  # then another first request of this key has made it
            with self._database.write() as session:
                _add_owner(session, owner_id)
        return owner_id


def _add_owner(session: Session, owner_id: str) -> None:
    if session.get(Owner, owner_id) is None:
        session.add(Owner(id=owner_id, name=owner_id))
