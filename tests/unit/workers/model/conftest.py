"""Tiny random models: a Qwen3 with a tied unembedding and a Llama with one of its own."""

from collections.abc import Iterator

import pytest
import torch

from tests.unit.workers.model import model_reference as reference
from workers.model.base import BaseModel


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["qwen3-tied", "llama-untied"])
def base(request: pytest.FixtureRequest) -> BaseModel:
    """A base model of each family."""
    return BaseModel(reference.plain_model(request.param), request.param)


@pytest.fixture
def qwen() -> BaseModel:
    """One base model, where the family does not matter."""
    return BaseModel(reference.plain_model("qwen3-tied"), "qwen3-tied")
