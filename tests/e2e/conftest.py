"""One service for all end-to-end tests, and the official SDK pointed at it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator

import pytest

os.environ.setdefault("TINKER_TELEMETRY", "0")

import tinker

from tests.e2e.service import Service
from tests.e2e.stack import running_stack

MODEL = "tiny"


@pytest.fixture(scope="session", autouse=True)
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The servers that `TINWORKS_TEST_STACK` asks for."""
    with running_stack(tmp_path_factory.mktemp("stack")):
        yield


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service with the tiny model; shared, so tests must not break it for good."""
    environment = {"TINWORKS_POLL_HOLD_S": "3"}  # so that polls of slow work are answered 408 a few times
    running = Service(tmp_path_factory.mktemp("service") / "data", environment=environment)
    running.start()
    yield running
    assert running.stop() == 0


@pytest.fixture
def connect(service: Service) -> Callable[..., tinker.ServiceClient]:
    """Makes SDK clients; each is a tenant of its own unless it is given a key."""

    def make(api_key: str | None = None) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=service.base_url, api_key=api_key or f"tml-{uuid.uuid4().hex}")

    return make


@pytest.fixture
def client(connect: Callable[..., tinker.ServiceClient]) -> tinker.ServiceClient:
    """An SDK client with a key of its own."""
    return connect()
