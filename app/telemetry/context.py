"""Which request a line of the log is about: `request_id` and `model_id`, the same in web and in workers.

Web learns the ids while it works on a request, often in a thread, and logs what went wrong outside of it. So every
request has one set of ids, which its threads share and which whoever knows one adds to. Workers, which work on many at
a time, bind theirs with structlog's own `bound_contextvars`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any

_ids: ContextVar[dict[str, str] | None] = ContextVar("ids_of_request", default=None)


def begin_request() -> None:
    """A request of which nothing is known yet."""
    _ids.set({})


def known_ids() -> dict[str, str]:
    """What is known of the request in work."""
    return _ids.get() or {}


def note(**ids: str) -> None:
    """The request in work is this one, or about that run. Outside of a request it means nothing."""
    if (known := _ids.get()) is not None:
        known.update(ids)


def add_ids(logger: Any, method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """structlog's processor: what is known of the request, unless the line says it itself."""
    for name, value in known_ids().items():
        event.setdefault(name, value)
    return event
