"""The native engine passes the suite of all engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engine_suite.rig import EngineFactory
from tests.engine_suite.suite import *  # noqa: F403
from workers.model.base import BaseModel
from workers.sample.engines.native import NativeEngine


@pytest.fixture(scope="module")
def engine_factory() -> EngineFactory:
    def make(folder: Path) -> NativeEngine:
        base = BaseModel.load(folder, device="cpu")

        def decode(tokens: Sequence[int]) -> str:
            return str(base.tokenizer().decode(list(tokens)))

        return NativeEngine(base, decode=decode)

    return make
