from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.workers.sample.native_lab import Lab, llama, qwen, qwen_with_windows


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab.of(qwen)


@pytest.fixture(scope="session", params=[qwen, llama, qwen_with_windows], ids=lambda build: build.__name__)
def any_lab(request: pytest.FixtureRequest) -> Lab:
    return Lab.of(request.param)
