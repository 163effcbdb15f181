"""Whose checkpoints a request reads: the caller's, or those of the account that a weights access token is of.

A weights access token is what that account sends as its own key: an API key, or a token that it got for one.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import SecretStr

from app.accounts.key_ring import KeyRing
from app.errors import InvalidRequest, Unauthorized


@dataclass(frozen=True, slots=True)
class Reader:
    """The owner that a request reads as. `by_token`: it is not the caller's own key that says so."""

    owner_id: str
    by_token: bool = False

    def field(self, name: str) -> str:
        """How errors about the checkpoint that `name` gives begin."""
        return f"{name} (read with weights_access_token)" if self.by_token else name


def reader_of(keys: KeyRing, owner_id: str, token: SecretStr | None) -> Reader:
    """The reader of a request of `owner_id` that carries `token`. Raises InvalidRequest for a token of nobody.

    It looks into the database: call it outside of transactions.
    """
    if token is None:
        return Reader(owner_id)
    try:
        return Reader(keys.identify(token.get_secret_value()).owner_id, by_token=True)
    except Unauthorized as error:
        raise InvalidRequest(
            "weights_access_token: unknown, revoked or expired; it must be an API key of the checkpoint's owner, or a "
            "token that was got for one"
        ) from error
