"""Samples that this process has accepted, until their clients have heard what became of them.

Redis holds all there is of a sample. When it has forgotten one, its client still waits for the feed to tell (WIRE
§3.5), so the process that accepted it has to know of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from app.sampling.feeds import CompletionFeeds

_MOST = 20_000


class AcceptedSamples:
    """Remembers the newest samples that no client has acknowledged; `remember` False: none."""

    def __init__(self, feeds: CompletionFeeds, *, remember: bool) -> None:
        self._feeds = feeds
        self._most = _MOST if remember else 0
        self._ids: OrderedDict[str, None] = OrderedDict()

    def add(self, request_id: str) -> None:
        """A sample was accepted."""
        self._ids[request_id] = None
        if len(self._ids) > self._most:
            self._ids.popitem(last=False)

    def told(self, request_ids: Iterable[str]) -> None:
        """The clients of these have heard of their end."""
        for request_id in request_ids:
            self._ids.pop(request_id, None)

    async def recover(self) -> None:
        """Redis was away: have it tell what it has lost."""
        await self._feeds.remind(list(self._ids))
