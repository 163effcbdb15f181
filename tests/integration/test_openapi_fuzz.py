"""Every route of the OpenAPI document, asked what it allows and what it forbids: no answer is a 5xx, and every
refusal is one that clients can read.

The cases are the same in each run. Where a request names things, half of the time it names things that exist.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode

from app.accounts.service import create_key
from app.main import create_app
from app.runs.models import Run
from tests.factories import add_checkpoint
from tests.integration.conftest import Api, running
from tests.integration.fuzz_answers import check_answer
from tests.integration.quick_sampler import quick_sampler

CASES, MANY_CASES = 8, 150
"""Of each kind, of each operation."""
CONFLICTS = {
    "/api/v1/create_model",
    "/api/v1/create_custom_loss",
    "/api/v1/create_sampling_session",
    "/api/v1/asample",
    "/api/v1/copy_weights",
    "/api/v1/forward",
    "/api/v1/forward_backward",
    "/api/v1/load_weights",
    "/api/v1/optim_step",
    "/api/v1/save_weights",
    "/api/v1/save_weights_external",
    "/api/v1/save_weights_for_sampler",
}
"""Routes with a number of the client's, which another request may have used."""
LASTING = {"session_id", "model_id", "training_run_id", "sampling_session_id", "sampler_id", "request_id"}
ENDS = {"/api/v1/sessions/{session_id}/finish", "/api/v1/unload_model"}
"""What these are asked to end is not what the others need."""


@lru_cache(maxsize=1)
def operations() -> dict[str, APIOperation]:
    """Every operation of the document, by method and path."""
    document = schemathesis.openapi.from_dict(create_app().openapi())
    found = [result.ok() for result in document.get_all_operations()]
    return {f"{operation.method.upper()} {operation.path}": operation for operation in found}


def tag_of(operation: APIOperation) -> str:
    return str(operation.definition.raw["tags"][0])


class World:
    """A service with something in it, and the names of what there is."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.throwaway = iter(create_key("leaver")[1] for _ in range(100_000))
        run, session = api.run(), api.session()
        theirs, finished = api.run("bob"), api.session()
        api.ok(f"sessions/{finished}/finish", {"reason": {"type": "success"}})
        with api.database.write() as rows:
            saved = add_checkpoint(rows, rows.get_one(Run, run))
        path = f"tinker://{run}/weights/{saved.name}"
        body = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
        sampler = api.ok("create_sampling_session", body)["sampling_session_id"]
        runs, sessions, samplers = [run, theirs], [session, run.partition(":")[0], finished], [sampler]
        self.names: dict[str, list[Any]] = {
            "session_id": sessions,
            "model_id": runs,
            "training_run_id": runs,
            "sampling_session_id": samplers,
            "sampler_id": samplers,
            "request_id": [f"{run}:0", f"{run}:1", f"{sampler}:0", f"{session}:custom_loss:0"],
            "path": [path, "first", "second"],
            "model_path": [path],
            "tinker_path": [path],
            "source_path": [path],
            "kind": ["weights", "sampler_weights", "external_weights"],
            "name": [saved.name, "tiny"],
            "base_model": ["tiny"],
            "model": ["tiny", path],
            "loss_fn": ["cross_entropy", "ppo", "custom"],
            **{name: [0, 1, 2, 3] for name in ("seq_id", "model_seq_id", "custom_loss_seq_id")},
        }
        self.to_end: dict[str, list[Any]] = {"session_id": [api.session()], "model_id": [api.run()]}

    def meant(self, case: Case, draw: random.Random) -> dict[str, Any]:
        """The request of a case, some of its names replaced by those of things that exist."""
        names = self.names | (self.to_end if case.operation.path in ENDS else {})
        case.path_parameters = _named(case.path_parameters, names, draw)
        request = case.as_transport_kwargs("http://testserver")
        if "json" in request:
            request["json"] = _named(request["json"], names, draw)
        return request

    def key(self, case: Case) -> str:
        revokes = case.method.upper() == "DELETE" and case.operation.path.endswith("/apikey/me")
        return next(self.throwaway) if revokes else self.api.keys["alice"]

    def ask(self, case: Case, draw: random.Random) -> httpx.Response:
        request = self.meant(case, draw)
        if isinstance(request.get("data"), bytes):
            request["content"] = request.pop("data")
        request.pop("cookies", None)
        headers = {"x-api-key": self.key(case)} | dict(request.pop("headers"))
        return self.api.client.request(**request, headers=headers, follow_redirects=False)


def _named(value: Any, names: dict[str, list[Any]], draw: random.Random) -> Any:
    if isinstance(value, list):
        return [_named(item, names, draw) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: draw.choice(names[key]) if key in names and draw.random() < 0.5 else _named(item, names, draw)
        for key, item in value.items()
    }


@pytest.fixture
def world(
    request: pytest.FixtureRequest, configure: Callable[..., None], redis_url: str, tmp_path: Path
) -> Iterator[World]:
    """On SQLite, or on the database that the test names as a parameter."""
    url = request.getfixturevalue(getattr(request, "param", "sqlite_url"))
    with running(configure, url, redis_url, tmp_path, key_cache_s=2) as api:
        with quick_sampler(api, answers=lambda request_id: request_id.startswith("direct")):
            yield World(api)


def fuzz(world: World, operation: APIOperation, mode: GenerationMode, cases: int) -> None:
    @settings(
        max_examples=cases,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), draw=st.randoms(use_true_random=False))
    def ask(case: Case, draw: random.Random) -> None:
        answer = world.ask(case, draw)
        sent = repr(case.path_parameters) + repr(case.query) + repr(case.body)
        check_answer(answer, openai=operation.path.startswith("/v1/"), sent=sent)
        assert answer.status_code != 409 or operation.path in CONFLICTS, answer.text
        assert answer.status_code != 401 or "x-api-key" in case.headers, answer.text

    with contextlib.suppress(Unsatisfiable):  # an operation that takes nothing can be asked nothing wrong
        ask()


TAGS = [
    "audit",
    "auth",
    "billing",
    "checkpoints",
    "fleet",
    "futures",
    "openai",
    "runs",
    "sampling",
    "sessions",
    "training",
]


def test_every_route_is_asked(world: World) -> None:
    assert {tag_of(operation) for operation in operations().values()} == set(TAGS)


def test_every_body_is_described(world: World) -> None:
    bare = [
        name
        for name, operation in operations().items()
        if operation.method.upper() in ("POST", "PUT")
        and not name.endswith("/publish")
        and "requestBody" not in operation.definition.raw
    ]
    assert bare == []


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
def test_no_request_is_answered_5xx_or_unreadably(world: World, tag: str, mode: GenerationMode) -> None:
    for operation in operations().values():
        if tag_of(operation) == tag:
            fuzz(world, operation, mode, CASES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", ["sqlite_url", "postgres_url"], indirect=True)
@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: str(mode.value))
def test_none_of_many_requests_is_answered_5xx_or_unreadably(world: World, tag: str, mode: GenerationMode) -> None:
    for operation in operations().values():
        if tag_of(operation) == tag:
            fuzz(world, operation, mode, MANY_CASES)
