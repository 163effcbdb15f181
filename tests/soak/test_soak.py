"""The judge sees growth and nothing else; a short soak runs to its end. `make soak` is the long one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.__main__ import ROLES, soak
from tests.soak.growth import judge, judge_latency, steps_within, tell_latency
from tests.soak.look import Look
from tests.soak.tenants import TENANTS

MINUTES = 45


def looks(what: str, value: Callable[[float], float]) -> list[Look]:
    """One every ten seconds; `value` of the share of the time that has passed."""
    count = 6 * MINUTES
    return [Look(10.0 * i, {what: value(i / count)}) for i in range(count)]


@pytest.mark.parametrize(
    ("what", "value", "grew"),
    [
        ("memory web", lambda t: 100.0, False),
        ("memory web", lambda t: 100.0 + 12.0 * t, True),  # 8 % from the middle of one third to that of the other
        ("memory web", lambda t: 100.0 + 4.0 * t, False),
        ("memory beat", lambda t: 10.0 + 2.0 * t, False),  # 12 %, but hardly more than a MiB
        ("memory web", lambda t: 100.0 - 30.0 * t, False),
        ("memory train", lambda t: 300.0 + 100.0 * (int(t * 50) % 5 == 0), False),  # it comes and goes
        ("files web", lambda t: 40 + int(8 * t), True),
        ("files web", lambda t: 40 + int(40 * t) % 3, False),
        ("connections postgres", lambda t: 10 + int(20 * t), True),
        ("keys redis", lambda t: 90 + int(200 * t), True),
        ("keys redis", lambda t: 90 + int(200 * t) % 60, False),
    ],
)
def test_growth_is_seen(what: str, value: Callable[[float], float], grew: bool) -> None:
    (finding,) = judge(looks(what, value))
    assert finding.grew == grew, finding.line()


@pytest.mark.parametrize(("growth", "grew"), [(0.0, False), (0.05, False), (0.2, True), (0.3, True), (-0.5, False)])
def test_an_old_service_that_is_slower_than_a_new_one_is_seen_through_noise(growth: float, grew: bool) -> None:
    draw = random.Random(1)

    def turn(took: float) -> list[float]:
        return [took * draw.choice([0.9, 1.0, 1.1, 1.2, 3.0]) for _ in range(20)]

    machine = [1 + draw.random() for _ in range(15)]  # it becomes slower and faster, for both
    (finding,) = judge_latency([{"steady": (turn(0.1 * slow * (1 + growth)), turn(0.1 * slow))} for slow in machine])
    assert finding.grew == grew, finding.line()


def test_a_slower_machine_alone_is_told_and_not_judged() -> None:
    steps = [(float(at), 0.1 * (1 + at / (60 * MINUTES))) for at in range(60 * MINUTES)]
    (finding,) = tell_latency({"steady": steps})
    assert finding.change == pytest.approx(0.54, abs=0.05)
    assert not finding.grew
    assert finding.line().startswith("told")


def test_only_steps_that_lie_within_a_turn_count() -> None:
    steps = [(10.5, 1.0), (12.0, 1.0), (19.9, 0.5), (36.0, 16.5), (37.0, 0.5)]  # the fourth was paused for a turn
    assert steps_within(steps, (10.0, 20.0)) == [1.0, 0.5]
    assert steps_within(steps, (35.0, 50.0)) == [0.5]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_soak_looks_at_everything(tmp_path: Path) -> None:
    found = {finding.what: finding for finding in soak(tmp_path, seconds=200, warm_up_s=10, rounds=2)}
    for role in ROLES:
        for kind in ("memory", "files", "connections", "threads"):
            assert found[f"{kind} {role}"].first > 0
    for name in TENANTS:
        assert found[f"step of {name} (ms)"].first > 0
        assert found[f"old/new step of {name}"].first > 0
    assert found["connections postgres"].first > 0
