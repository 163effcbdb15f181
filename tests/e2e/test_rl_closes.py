"""Reinforcement learning closes its loop: what the trainer learns from samples, the sampler samples."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import tinker

from tests.e2e.roles import ROOT, Deployment
from tests.services import PostgresServer, redis_server

LOSSES = ("importance_sampling", "ppo", "cispo", "stable_reinforce")
STEPS = 30
GAP = 1e-4
"""Of trainer and sampler in float32 (SEMANTICS §6)."""


@pytest.fixture(scope="module")
def deployment(shared_postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Trainer and sampler are processes of their own."""
    folder = tmp_path_factory.mktemp("rl")
    name = shared_postgres.create()
    with redis_server(folder) as redis:
        running = Deployment(folder / "data", database_url=shared_postgres.url(name), redis_url=redis.url)
        try:
            running.start()
            yield running
        finally:
            running.close()
    shared_postgres.drop(name)


@pytest.fixture(scope="module")
def client(deployment: Deployment) -> tinker.ServiceClient:
    key = deployment.tinworks("keys", "create", "ada").strip()
    return tinker.ServiceClient(base_url=deployment.base_url, api_key=key)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """`examples/rl_quarter.py`."""
    spec = importlib.util.spec_from_file_location("rl_quarter", ROOT / "examples" / "rl_quarter.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("loss", LOSSES)
def test_thirty_steps_raise_the_reward(
    client: tinker.ServiceClient, example: ModuleType, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = example.learn(client, example.parse(["--loss", loss, "--steps", str(STEPS)]))
    rewards = [step.reward for step in steps]
    assert sum(rewards[:3]) / 3 == pytest.approx(0.25, abs=0.08)
    assert sum(rewards[-3:]) / 3 > 0.8, rewards
    assert max(step.gap for step in steps) < GAP
    printed = re.findall(r"sampler/trainer gap ([\d.e+-]+)", capsys.readouterr().out)
    assert [float(gap) for gap in printed] == [pytest.approx(step.gap, rel=0.01) for step in steps]
