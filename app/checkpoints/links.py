"""Download links that the API signs itself, for blob stores that sign none: whoever holds one may fetch one file.

A link is a token, signed with a key of its own, that names a snapshot's file, or none for the archive of all files, and
the second at which it expires. It stays valid when its checkpoint is deleted, as long as the file is there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property

import jwt

from app.accounts.secret import derived_key
from app.db import Database
from app.errors import Forbidden
from app.settings import Settings

_ALGORITHM = "HS256"
_REQUIRED = ["exp", "iat", "snapshot", "file", "name"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a link leads to. `file` None: an archive. `name`: what the client's copy is called."""

    snapshot_id: str
    file: str | None
    name: str


@dataclass(frozen=True, slots=True)
class Link:
    """A link that was read. `signed_at`: Unix seconds."""

    target: Target
    signed_at: int


class LinkSigner:
    """Makes and checks links. The secret is looked up when it is first needed."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings

    @cached_property
    def _key(self) -> bytes:
        return derived_key(self._database, self._settings, "download links")

    def sign(self, target: Target, *, expires_at: int) -> str:
        """The token of a new link; `expires_at` in Unix seconds."""
        claims = {
            "iat": int(time.time()),
            "exp": expires_at,
            "snapshot": target.snapshot_id,
            "file": target.file or "",
            "name": target.name,
        }
        return jwt.encode(claims, self._key, algorithm=_ALGORITHM)

    def read(self, token: str) -> Link:
        """What a link leads to. Raises Forbidden if it has expired, or was not signed by this installation."""
        options = {"require": _REQUIRED, "verify_iat": False}  # another host's clock may be ahead
        try:
            claims = jwt.decode(token, self._key, algorithms=[_ALGORITHM], options=options)  # type: ignore[arg-type]
        except jwt.ExpiredSignatureError as error:
            raise Forbidden("this download link has expired; ask for a new one") from error
        except jwt.InvalidTokenError as error:
            raise Forbidden("this download link was not signed by this server, or was altered") from error
        return Link(Target(claims["snapshot"], claims["file"] or None, claims["name"]), claims["iat"])
