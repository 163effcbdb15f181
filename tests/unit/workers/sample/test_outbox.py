"""What is over and what is not, while Redis comes and goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisAway

from workers.sample.engines.base import Cancelled
from workers.sample.outbox import Outbox


class Desk:
    """Notes what it is told; calls of a kind in `away` fail."""

    def __init__(self) -> None:
        self.finished: list[str] = []
        self.released: list[str] = []
        self.away: set[str] = set()

    def finish(self, answers: Sequence[tuple[str, Any]]) -> None:
        if "finish" in self.away:
            raise RedisAway
        self.finished += [request_id for request_id, _ in answers]

    def release(self, request_ids: Iterable[str]) -> None:
        if "release" in self.away:
            raise RedisAway
        self.released += request_ids


@pytest.mark.parametrize("away", ["finish", "release"])
def test_nothing_is_forgotten_when_redis_goes_between_two_calls(away: str) -> None:
    desk = Desk()
    outbox = Outbox(desk, None, wake=lambda: None)  # type: ignore[arg-type]
    outbox.fail("failed", "for a reason")
    outbox.deliver("cancelled", Cancelled("by its client"))
    desk.away = {away}
    with pytest.raises(RedisAway):
        outbox.store()
    desk.away = set()
    assert outbox.store() == {"failed", "cancelled"}
    assert (desk.finished, desk.released) == (["failed"], ["cancelled"])
    assert outbox.store() == set()
