"""Keys and owners: made, listed, described, revoked."""

from __future__ import annotations

import hashlib
import secrets
import uuid

from sqlalchemy import select

from app.accounts.models import ApiKey, Owner
from app.audit import service as audit
from app.db import Database, get_database, utc_now

KEY_PREFIX = "tml-"


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
        session.flush()
        audit.record(
            session, owner.id, "organizations", "api_key_create", key_id=key.id, name=key.name, prefix=key.prefix
        )
    return key, secret


def list_keys(owner_name: str | None = None) -> list[tuple[ApiKey, Owner]]:
    """All keys with their owners, revoked ones too, oldest first."""
    query = select(ApiKey, Owner).join(Owner, Owner.id == ApiKey.owner_id).order_by(ApiKey.id)
    if owner_name is not None:
        query = query.where(Owner.name == owner_name)
    with get_database().read() as session:
        return [(key, owner) for key, owner in session.execute(query)]


def revoke_key(key_id: int, *, database: Database | None = None) -> bool:
    """Revoke a key. False if there is none of that id, or it was revoked before."""
    with (database or get_database()).write() as session:
        key = session.get(ApiKey, key_id, with_for_update=True)
        if key is None or key.revoked_at is not None:
            return False
        key.revoked_at = utc_now()
        audit.record(
            session, key.owner_id, "organizations", "api_key_revoke", key_id=key.id, name=key.name, prefix=key.prefix
        )
        return True


def describe_key(database: Database, key_id: int) -> tuple[ApiKey, Owner]:
    """A key and its owner."""
    with database.read() as session:
        key = session.get_one(ApiKey, key_id)
        return key, session.get_one(Owner, key.owner_id)
