"""A tenant has so many requests per second and a reserve, whatever others do."""

from __future__ import annotations

import pytest

from app.rate_limit import RESERVE_S, RateLimit, TooManyRequests

PATH = "/api/v1/sessions"


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def allowed(limit: RateLimit, owner_id: str, count: int) -> int:
    """How many of so many requests at once are taken."""
    taken = 0
    for _ in range(count):
        try:
            limit.take(owner_id, PATH)
        except TooManyRequests:
            continue
        taken += 1
    return taken


def test_a_reserve_then_the_rate() -> None:
    limit = RateLimit(5, clock=(clock := Clock()))
    assert allowed(limit, "a", 1000) == 5 * RESERVE_S
    clock.now += 2
    assert allowed(limit, "a", 1000) == 10


def test_one_tenant_takes_nothing_from_another() -> None:
    limit = RateLimit(5, clock=Clock())
    allowed(limit, "a", 1000)
    assert allowed(limit, "b", 10) == 10


def test_a_refusal_says_when_to_come_again() -> None:
    limit = RateLimit(0.1, clock=(clock := Clock()))
    limit.take("a", PATH)
    with pytest.raises(TooManyRequests) as refused:
        limit.take("a", PATH)
    assert (refused.value.status, refused.value.headers) == (429, {"Retry-After": "10"})
    clock.now += 10
    limit.take("a", PATH)


@pytest.mark.parametrize("path", ["create_model", "optim_step", "retrieve_future", "session_heartbeat", "asample"])
def test_what_the_sdk_gives_up_on_is_never_counted(path: str) -> None:
    limit = RateLimit(0.1, clock=Clock())
    for _ in range(100):
        limit.take("a", f"/api/v1/{path}")


def test_without_a_rate_everything_is_taken() -> None:
    assert allowed(RateLimit(0, clock=Clock()), "a", 10_000) == 10_000


def test_tenants_who_are_quiet_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.rate_limit._MOST_TENANTS", 10)
    limit = RateLimit(1, clock=(clock := Clock()))
    for number in range(100):
        limit.take(f"tenant-{number}", PATH)
        clock.now += 2
    assert len(limit._buckets) <= 10
