"""Every family of models is spread over ranks, and ranks of another host are as good as those of this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app.up.network import free_port
from tests.integration.ranks import (
    MICRO_BATCH_TOKENS,
    assert_same_gradients,
    assert_same_outputs,
    many_kinds,
    outputs,
    ranks,
)
from tests.services import dies_with_us
from tests.unit.workers.model import families
from tests.unit.workers.model import model_reference as reference
from workers.model.base import BaseModel
from workers.model.engine import SoloEngine
from workers.model.forward import Work
from workers.model.ranks.placement import Placement

pytestmark = pytest.mark.slow  # processes start for each


def test_ranks_of_another_host_join_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference.plain_model("qwen3-tied").save_pretrained(tmp_path)
    one = SoloEngine(BaseModel.load(tmp_path, dtype=torch.float32), micro_batch_tokens=MICRO_BATCH_TOKENS)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    place = Placement(rank=0, world=3, local=0, local_world=1, port=free_port())
    variables = {
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
        "WORLD_SIZE": "3",
        "RANK": "1",
        "TINWORKS_TRAIN_RANKS": "2",
    }
    host = subprocess.Popen(dies_with_us([sys.executable, "-m", "workers.model.ranks"]), env=os.environ | variables)
    with ranks(place, tmp_path) as engine:
        mine, alone = many_kinds(engine.base), many_kinds(one.base)
        assert_same_outputs(outputs(engine, mine), outputs(one, alone))
        assert_same_gradients(engine, [work.adapter for work in mine], [work.adapter for work in alone])
    assert host.wait(30) == 0


@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_is_spread(family: str, tmp_path: Path) -> None:
    families.plain(family).save_pretrained(tmp_path)
    alone_engine = SoloEngine(BaseModel.load(tmp_path, dtype=torch.float32), micro_batch_tokens=MICRO_BATCH_TOKENS)
    with ranks(2, tmp_path) as engine:
        pairs = [
            [Work(reference.random_adapter(base, 1), reference.random_data(1, [6, 31, 3]), "cross_entropy")]
            for base in (engine.base, alone_engine.base)
        ]
        assert_same_outputs(outputs(engine, pairs[0]), outputs(alone_engine, pairs[1]))
        assert_same_gradients(engine, [pairs[0][0].adapter], [pairs[1][0].adapter])
