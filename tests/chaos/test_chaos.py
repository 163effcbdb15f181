"""Nothing is lost: whatever dies, at whatever moment, three scripts only wait, and train what they train in peace.

`make chaos` does this with a hundred other seeds.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from tests.chaos.blows import KILLING, BlowKind, Plan, draw
from tests.chaos.seed import Outcome, quiet_run, run
from workers.model.tiny import make_tiny_model

PLANS = (
    draw(6, database="sqlite", store="local", layout="one", batch_polls=False),
    draw(9, database="postgres", store="s3", layout="two", batch_polls=True),
    draw(22, database="postgres", store="local", layout="ranks", batch_polls=False),
)
KILLS = 5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(made)
    return made


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Outcome:
    """The scripts when nothing happens."""
    return quiet_run(tmp_path_factory.mktemp("chaos") / "quiet", model)


def test_each_kind_of_blow_falls_in_one_of_them() -> None:
    assert {blow.kind for plan in PLANS for blow in plan.blows} == set(get_args(BlowKind))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.database}-{plan.store}-{plan.layout}")
def test_nothing_is_lost(plan: Plan, tmp_path: Path, model: Path, quiet: Outcome) -> None:
    outcome = run(plan, tmp_path / "chaos", model, quiet)
    print(outcome.line())
    assert not outcome.wrong, f"{outcome.wrong}\n{plan.command}\nlogs: {outcome.folder}"
    assert len([blow for blow in outcome.struck if blow.partition("@")[0] in KILLING]) >= KILLS
    assert outcome.replays > 0
