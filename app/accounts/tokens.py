"""Tokens: what a client gets for its key and sends in the key's place, a JWT that this installation signs (WIRE §1.2).

A token says who its bearer is; it does not say that the key is still valid. Whoever reads one looks the key up.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import jwt

from app.accounts.secret import derived_key
from app.db import Database
from app.errors import InvalidToken
from app.settings import Settings

TOKEN_PREFIX = "eyJ"
"""What every JWT begins with: the base64 of `{"`."""
_ALGORITHM = "HS256"
_ISSUER = "tinworks"
_REQUIRED = ["exp", "iat", "iss", "sub", "org_id"]


def user_urn(owner_id: str) -> str:
    """How an owner is named towards clients."""
    return f"tinworks:owner:{owner_id}"


@dataclass(frozen=True, slots=True)
class Token:
    """A token's content. `key_id`: the key that it was exchanged for, None on an open server; `expires_at`: Unix
    seconds."""

    owner_id: str
    key_id: int | None
    expires_at: float


class TokenSigner:
    """Makes and checks tokens. The secret is looked up when it is first needed."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._key: bytes | None = None
        self._lock = threading.Lock()

    def _signing_key(self) -> bytes:
        with self._lock:
            if self._key is None:
                self._key = derived_key(self._database, self._settings, "access tokens")
            return self._key

    def sign(self, *, owner_id: str, owner_name: str, key_id: int | None) -> str:
        """A new token, valid for `token_ttl_s` from now. `email` is what clients show of its bearer."""
        now = time.time()
        claims = {
            "iss": _ISSUER,
            "iat": now,
            "exp": now + self._settings.token_ttl_s,
            "sub": user_urn(owner_id),
            "org_id": owner_id,
            "email": owner_name,
            "key_id": key_id,
        }
        return jwt.encode(claims, self._signing_key(), algorithm=_ALGORITHM)

    def read(self, token: str) -> Token:
        """The content of a token that this installation has signed and that has not expired. Raises InvalidToken."""
        options = {"require": _REQUIRED, "verify_iat": False}  # another host's clock may be ahead
        try:
            claims = jwt.decode(
                token,
                self._signing_key(),
                algorithms=[_ALGORITHM],
                issuer=_ISSUER,
                options=options,  # type: ignore[arg-type]
            )
        except jwt.ExpiredSignatureError as error:
            raise InvalidToken("X-API-Key: this token has expired; exchange the key for a new one") from error
        except jwt.InvalidTokenError as error:
            raise InvalidToken("X-API-Key: this token was not signed by this server, or was altered") from error
        return Token(claims["org_id"], claims.get("key_id"), float(claims["exp"]))
