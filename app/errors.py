"""The errors that Tinworks tells its clients, and what each becomes: an HTTP status, or a failed future's category.

Rules of the protocol that are kept here and nowhere else (WIRE §1.7): 402 is never used, 409 only for a replay that
contradicts the first request, a 5xx only for what may pass by itself.
"""

from __future__ import annotations

from typing import ClassVar, Literal

Category = Literal["user", "server", "unknown"]


_LONGEST = 2000


def shortened(detail: str) -> str:
    """A text for the client, who may have sent a name of megabytes and needs to see only how it begins."""
    return detail if len(detail) <= _LONGEST else f"{detail[:_LONGEST]}…"


class TinworksError(Exception):
    """An error with a text for the client. `status` is its HTTP status, `category` that of a future failed by it."""

    status: ClassVar[int] = 500
    category: ClassVar[Category] = "server"
    headers: dict[str, str] = {}

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = shortened(detail)


class InvalidRequest(TinworksError):
    """The request is wrong and stays wrong; the text names the field."""

    status = 400
    category = "user"


class Unauthorized(TinworksError):
    """No key, an unknown key, or a revoked one."""

    status = 401
    category = "user"
    headers = {"WWW-Authenticate": "X-API-Key"}


class InvalidToken(Unauthorized):
    """A token that is expired, forged, or whose key was revoked: the client may exchange its key for a new one."""

    headers = {"WWW-Authenticate": 'X-API-Key error="invalid_token"'}


class Forbidden(TinworksError):
    """A download link that has expired or that nobody has signed."""

    status = 403
    category = "user"


class NotFound(TinworksError):
    """No such thing, or it is somebody else's: the two look the same."""

    status = 404
    category = "user"


class ConflictingReplay(TinworksError):
    """The sequence id was used before with another content."""

    status = 409
    category = "user"


class Gone(TinworksError):
    """It was there and will not come back: a finished session, a sample that was lost."""

    status = 410
    category = "user"


class TooLarge(TinworksError):
    """The body exceeds `max_request_bytes` after decompression."""

    status = 413
    category = "user"


class TooBusy(TinworksError):
    """The queue is full; come back later."""

    status = 429
    headers = {"Retry-After": "1"}


class Unavailable(TinworksError):
    """Something that the service needs is away for now."""

    status = 503
    headers = {"Retry-After": "1"}


class StorageUnavailable(Unavailable):
    """The blob store cannot do its part now. `reason`, for clients too, says neither bucket nor key nor folder."""

    headers = {"Retry-After": "2"}

    def __init__(self, reason: str) -> None:
        super().__init__(f"the blob store cannot be used: {reason}; try again later")
        self.reason = reason


class LeaseLost(TinworksError):
    """Another worker holds the run now; what this one computed for it does not count."""
