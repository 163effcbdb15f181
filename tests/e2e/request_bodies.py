"""A body that is right for each route that takes one, with nothing in it that could be left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tests.e2e.field_probes_compat import CHAT
from tests.e2e.field_world import PROMPT, ROWS, World

Body = Callable[[World], dict[str, Any]]

BATCH = {
    "data": [
        {
            "model_input": {"chunks": [{"tokens": ROWS[0][:-1]}]},
            "loss_fn_inputs": {"target_tokens": {"data": ROWS[0][1:], "dtype": "int64"}},
        }
    ],
    "loss_fn": "cross_entropy",
}
GRAPH = {
    "format": 1,
    "nodes": [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
        {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "logprobs"}]},
        {"op": "output", "name": "output", "target": "output", "args": [{"tuple": [{"ref": "total"}, {"dict": {}}]}]},
    ],
}


def _nothing(world: World) -> dict[str, Any]:
    return {}


def _first(**fields: Any) -> Body:
    """The first operation of a new run."""
    return lambda world: {"model_id": world.run(), "seq_id": 1, **fields}


def _of_session(number: str, **fields: Any) -> Body:
    return lambda world: {"session_id": world.session, number: world.serial(), **fields}


BODIES: Mapping[str, Body] = {
    "POST /v1/chat/completions": lambda world: dict(CHAT),
    "POST /v1/chat/completions/render": lambda world: dict(CHAT),
    "POST /v1/completions": lambda world: {"model": "tiny", "prompt": "x"},
    "POST asample": lambda world: {
        "prompt": {"chunks": [{"tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 1},
        "sampling_session_id": world.sampler,
        "seq_id": world.serial(),
    },
    "POST auth/token": _nothing,
    "POST cancel_future": lambda world: {"request_id": world.large_result},
    "POST client/config": _nothing,
    "POST client/dynamic_config": _nothing,
    "POST copy_weights": lambda world: {"source_path": world.weights, "destination_project_id": "alpha"},
    "POST create_custom_loss": _of_session(
        "custom_loss_seq_id", name="x", inputs=[{"name": "logprobs", "rank": 1}], graph=GRAPH
    ),
    "POST create_model": _of_session("model_seq_id", base_model="tiny", lora_config={"rank": 2}),
    "POST create_sampling_session": _of_session("sampling_session_seq_id", base_model="tiny"),
    "POST create_session": _nothing,
    "POST forward": _first(forward_input=BATCH),
    "POST forward_backward": _first(forward_backward_input=BATCH),
    "POST get_info": lambda world: {"model_id": world.trained_run},
    "POST join_sampling_session": lambda world: {"sampling_session_id": world.sampler},
    "POST load_weights": lambda world: {
        "path": world.weights,
        "optimizer": False,
        "model_id": world.run(),
        "seq_id": 1,
    },
    "POST load_weights of a new run": lambda world: {
        "path": world.weights,
        "optimizer": False,
        "session_id": world.session,
        "model_seq_id": world.serial(),
    },
    "POST optim_step": _first(adam_params={}),
    "POST retrieve_future": lambda world: {"request_id": world.large_result},
    "POST retrieve_futures": lambda world: {"target": {"sampling_session_id": world.sampler}, "timeout": 0},
    "POST save_weights": _first(path="x"),
    "POST save_weights_external": _first(path="x"),
    "POST save_weights_for_sampler": _first(path="x"),
    "POST session_heartbeat": lambda world: {"session_id": world.session},
    "POST sessions/search": _nothing,
    "POST sessions/{session_id}/finish": lambda world: {"reason": {"type": "success"}},
    "POST telemetry": _nothing,
    "POST unload_model": lambda world: {"model_id": world.spare_run},
    "POST weights_info": lambda world: {"tinker_path": world.weights},
    "PUT sessions/{session_id}/project": lambda world: {"project_id": "alpha"},
    "PUT training_runs/{training_run_id}/checkpoints/{kind}/{name}/ttl": lambda world: {"ttl_seconds": None},
}
"""By method and route, as the service itself lists them; of a route with two forms, the other one by its name."""

WELCOMES_MORE = frozenset({"POST client/config", "POST client/dynamic_config", "POST telemetry"})
"""Routes that hear what a client says of itself; a newer one may say more."""


def send(world: World, route: str, **more: Any) -> Any:
    """Send the route's body, with more fields; what came of it."""
    method, _, path = route.partition(" of ")[0].partition(" ")
    run, kind, name = world.weights.removeprefix("tinker://").split("/")
    places = {"session_id": world.spare_session, "training_run_id": run, "kind": kind, "name": name}
    url = path.format(**places)
    if path.startswith("/"):
        url = world.base_url + url
    answer = world.wire.http.request(method, url, json={**BODIES[route](world), **more})
    if answer.status_code < 400 and b'"request_id"' in answer.content:
        return world.settle(answer)
    return world.result(answer)
