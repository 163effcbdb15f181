"""Every field of every request does something that its client can see, or is refused by name; none is ignored.

The fields are found by looking at the SDK, the protobuf messages and the service (`field_inventory`), so a field that a
newer SDK brings fails here until somebody has said what it does (`request_fields`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e import field_inventory as inventory
from tests.e2e.field_checks import Check, Probe, same
from tests.e2e.field_world import ROWS, Refusal, World
from tests.e2e.request_bodies import BATCH, BODIES, WELCOMES_MORE, send
from tests.e2e.request_fields import CHECKS, STEADY
from tests.e2e.service import Service

HEADERS = {  # read without being declared
    "GET /v1/models authorization:",
    "POST forward_backward content-encoding:",
    "POST forward_backward content-type:",
}


@pytest.fixture(scope="module")
def openapi(service: Service) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{service.base_url}/openapi.json").json()
    return found


@pytest.fixture(scope="module")
def world(service: Service) -> World:
    return World(service.base_url)


def test_the_table_has_every_field_and_no_other(openapi: dict[str, Any]) -> None:
    asked = {
        *inventory.sdk_fields(),
        *inventory.proto_fields(),
        *inventory.own_fields(),
        *inventory.loss_fields(),
        *(name for name in inventory.parameters(openapi) if not name.endswith("}")),
        *HEADERS,
    }
    told = {field for check in CHECKS for field in check.fields}
    assert sorted(asked - told) == [], "say in request_fields what these do"
    assert sorted(told - asked) == [], "no request has these"


def test_what_the_sdk_writes_by_hand_is_known_to_its_route(openapi: dict[str, Any]) -> None:
    for route, field in inventory.hand_made():
        assert field in inventory.known_to(openapi, route), f"{route}: {field}"


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.id)
def test_field(check: Check, world: World) -> None:
    check.holds(world)


@pytest.mark.parametrize("probe", STEADY, ids=lambda probe: probe.__name__)
def test_the_same_request_shows_the_same(probe: Probe, world: World) -> None:
    """Otherwise a difference would say nothing."""
    assert same(world.see(probe, {}), probe(world, {}))


def test_every_route_with_a_body_has_one_here(openapi: dict[str, Any]) -> None:
    assert inventory.bodies(openapi).keys() == {route.partition(" of ")[0] for route in BODIES}


@pytest.mark.parametrize("route", BODIES)
def test_an_unknown_field_is_refused_by_name(route: str, world: World) -> None:
    seen = send(world, route, surprise=1)
    if route in WELCOMES_MORE:
        assert not isinstance(seen, Refusal), seen
    else:
        assert isinstance(seen, Refusal) and seen.blames_the_request and "surprise: unknown field" in seen.text, seen


@pytest.mark.parametrize("route", BODIES)
def test_null_is_as_good_as_absent(route: str, openapi: dict[str, Any], world: World) -> None:
    body = BODIES[route](world)
    forms = inventory.bodies(openapi)[route.partition(" of ")[0]]
    form = next(form for form in forms if body.keys() >= set(form.get("required", ())))
    absent = form.get("properties", {}).keys() - body.keys()
    seen = send(world, route, **dict.fromkeys(absent))
    assert not isinstance(seen, Refusal), seen


def test_ids_in_paths_are_looked_up(openapi: dict[str, Any], world: World) -> None:
    for path, methods in openapi["paths"].items():
        for method in methods if "{" in path else ():
            url = world.base_url + re.sub(r"\{[^}]*\}", "nobody", path)
            body = BODIES.get(f"{method.upper()} {path.removeprefix('/api/v1/')}")
            answer = world.wire.http.request(method, url, json=body(world) if body else None)
            assert answer.status_code in (400, 403, 404), f"{method} {path}: {answer.status_code}"
            assert "nobody" in answer.text or "{token}" in path, f"{method} {path}: {answer.text}"


OPERATIONS: dict[str, Callable[[World], dict[str, Any]]] = {
    "forward": lambda world: {"forward_input": BATCH},
    "forward_backward": lambda world: {"forward_backward_input": BATCH},
    "optim_step": lambda world: {"adam_params": {}},
    "save_weights": lambda world: {"path": "x"},
    "save_weights_external": lambda world: {"path": "x"},
    "save_weights_for_sampler": lambda world: {"path": "x"},
    "load_weights": lambda world: {"path": world.weights, "optimizer": False},
}


def test_every_operation_waits_for_those_before_it_and_is_itself_when_repeated(world: World) -> None:
    run = world.run()
    bodies = {
        route: {"model_id": run, "seq_id": seq_id, **make(world)}
        for seq_id, (route, make) in enumerate(OPERATIONS.items(), start=2)
    }
    futures = [world.wire.post(route, body).json()["request_id"] for route, body in bodies.items()]
    with ThreadPoolExecutor(len(futures)) as threads:
        polls = list(threads.map(lambda name: world.wire.post("retrieve_future", {"request_id": name}), futures))
    for poll in polls:
        assert poll.status_code == 408 and "seq_id 1" in poll.json()["queue_state_reason"]
    world.wire.forward_backward(run, 1, ROWS)
    for future in futures:
        assert not isinstance(world.result(world.wire.wait(future)), Refusal)
    assert [world.wire.post(route, body).json()["request_id"] for route, body in bodies.items()] == futures


@pytest.mark.parametrize(
    ("route", "field", "other"),
    [
        ("POST create_model", "model_seq_id", {"lora_config": {"rank": 3}}),
        ("POST create_custom_loss", "custom_loss_seq_id", {"name": "other"}),
        ("POST asample", "seq_id", {"num_samples": 2}),
        ("POST create_sampling_session", "sampling_session_seq_id", None),
    ],
)
def test_a_number_is_given_to_one_request(route: str, field: str, other: dict[str, Any] | None, world: World) -> None:
    _, path = route.split(" ")
    body = BODIES[route](world)
    if other is None:
        other = {"base_model": None, "model_path": world.sampler_weights}
    first, again, another = (world.wire.post(path, {**body, **more}) for more in ({}, {}, other))
    assert first.status_code == 200 and again.json() == first.json()
    assert another.status_code == 409 and field in another.json()["detail"]
