"""Training requests with some fields changed, and what can be seen afterwards: results, and logprobs after a step."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.json_format import ParseDict

from app.runs.loss_specs import LOSS_SPECS
from app.wire import tinker_pb2 as pb
from tests.e2e.field_checks import Probe
from tests.e2e.field_world import LR, MORE_ROWS, PROMPT, ROWS, Changes, Refusal, World

TOKENS = ROWS[0]
N = len(TOKENS) - 1
DIMUON = {"type": "dimuon", "version": 1}


def packed(values: list[Any], dtype: str) -> str:
    """Numbers as the bytes of a protobuf field, in JSON's form of them."""
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode()


def i4(*values: int) -> str:
    """Tokens."""
    return packed(list(values), "<i4")


def i8(*values: int) -> str:
    """Integers of a tensor."""
    return packed(list(values), "<i8")


def f4(*values: float) -> str:
    """Floats of a tensor."""
    return packed(list(values), "<f4")


def ints(*values: int, **fields: Any) -> dict[str, Any]:
    """An int64 tensor."""
    return {"dense": i8(*values), "dtype": "DTYPE_INT64", **fields}


def floats(*values: float, **fields: Any) -> dict[str, Any]:
    """A float32 tensor."""
    return {"dense": f4(*values), "dtype": "DTYPE_FLOAT32", **fields}


# -- runs


def create_model(world: World, changes: Changes) -> Any:
    """`create_model`: what the run is, and its logprobs after a step."""
    base = {
        "session_id": world.session,
        "model_seq_id": world.serial(),
        "base_model": "tiny",
        "lora_config": {"rank": 2, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True},
        "optimizer_config": {"type": "adamw"},
        "type": "create_model",
    }
    body = world.body(base, changes)
    created = world.settle(world.wire.post("create_model", body))
    if isinstance(created, Refusal):
        return created
    assert created["model_id"] == f"{body['session_id']}:train:{body['model_seq_id']}"
    number = {"number": body["model_seq_id"]} if "model_seq_id" in changes else {}
    return number | look_at(world, created["model_id"], 1)


def look_at(world: World, run: str, seq_id: int) -> dict[str, Any]:
    """What a run says of itself, and its logprobs after a step."""
    info = world.json(world.wire.post("get_info", {"model_id": run}))
    listed = world.get(f"training_runs/{run}")
    before = world.wire.logprobs(run, seq_id, ROWS)
    world.wire.forward_backward(run, seq_id + 1, ROWS)
    if info["optimizer_config"]["type"] == "adamw":
        world.wire.optim_step(run, seq_id + 2, LR)
    else:
        params = {"type": "dimuon", "learning_rate": LR}
        world.wire.post("optim_step", {"model_id": run, "seq_id": seq_id + 2, "optimizer_params": params})
    return {
        "info": {key: value for key, value in info.items() if key != "model_id"},
        "user_metadata": listed["user_metadata"],
        "base_model": listed["base_model"],
        "before": before,
        "after": world.wire.logprobs(run, seq_id + 3, ROWS),
    }


def create_from(world: World, changes: Changes) -> Any:
    """`load_weights` that makes a run."""
    base = {
        "session_id": world.session,
        "model_seq_id": world.serial(),
        "path": world.weights,
        "optimizer": False,
        "type": "load_weights",
    }
    body = world.body(base, changes)
    created = world.settle(world.wire.post("load_weights", body))
    if isinstance(created, Refusal):
        return created
    number = {"number": body["model_seq_id"]} if "model_seq_id" in changes else {}
    return number | look_at(world, created["model_id"], 1)


def load(world: World, changes: Changes) -> Any:
    """`load_weights` into a run that has made a step of its own."""
    run = world.run()
    world.step(run, 1)
    base = {"model_id": run, "seq_id": 3, "path": world.weights, "optimizer": False, "type": "load_weights"}
    loaded = world.settle(world.wire.post("load_weights", world.body(base, changes)))
    if isinstance(loaded, Refusal):
        return loaded
    return look_at(world, run, 4)


# -- steps


def _steps(world: World, run: str, send: Callable[[int], Any]) -> Any:
    """Two steps of the same kind, and the logprobs after them."""
    world.wire.forward_backward(run, 1, ROWS)
    first = world.settle(send(2))
    if isinstance(first, Refusal):
        return first
    world.wire.forward_backward(run, 3, MORE_ROWS)
    send(4)
    return world.wire.logprobs(run, 5, ROWS)


def optim_step(world: World, changes: Changes) -> Any:
    """`optim_step` of a run with AdamW."""
    run = world.run()
    params = {"learning_rate": LR, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}

    def send(seq_id: int) -> Any:
        base = {"model_id": run, "seq_id": seq_id, "adam_params": params, "type": "optim_step"}
        return world.wire.post("optim_step", world.body(base, changes))

    return _steps(world, run, send)


def dimuon_step(world: World, changes: Changes) -> Any:
    """`optim_step` of a run with Dimuon."""
    run = world.wire.create_run(rank=2, optimizer=DIMUON)
    params = {"type": "dimuon", "learning_rate": LR, "grad_clip_norm": 0.0, "beta1": 0.9}

    def send(seq_id: int) -> Any:
        base = {"model_id": run, "seq_id": seq_id, "optimizer_params": params, "type": "optim_step"}
        return world.wire.post("optim_step", world.body(base, changes))

    return _steps(world, run, send)


# -- passes


def decoded(payload: bytes) -> dict[str, Any]:
    """The result of a pass."""
    output = pb.ForwardBackwardOutput.FromString(payload)
    arrays = [
        {name: np.frombuffer(field.data, "<f4") for name, field in record.fields.items()}
        for record in output.loss_fn_outputs
    ]
    return {"outputs": arrays, "metrics": dict(output.metrics)}


def _passed(world: World, run: str, outcome: Any) -> Any:
    """The result of a run's first operation, and the logprobs after a step that follows it."""
    if isinstance(outcome, Refusal):
        return outcome
    world.wire.optim_step(run, 2, LR)
    return {"result": decoded(outcome), "after": world.wire.logprobs(run, 3, ROWS)}


def _pass(world: World, base: dict[str, Any], changes: Changes) -> Any:
    run = world.run()
    message = ParseDict(world.body({"model_id": run, "seq_id": 1, **base}, changes), pb.ForwardBackwardRequest())
    return _passed(world, run, world.settle(world.wire.send(message)))


def _batch(loss_fn: str, **inputs: Any) -> dict[str, Any]:
    datum = {
        "model_input": [{"encoded_text": {"tokens": i4(*TOKENS[:-1])}}],
        "loss_fn_inputs": {"target_tokens": ints(*TOKENS[1:]), **inputs},
    }
    return {"data": [datum], "loss_fn": loss_fn, "loss_fn_config": {}, "loss_fn_config_v2": {}}


def cross_entropy(world: World, changes: Changes) -> Any:
    """`forward_backward` with cross entropy."""
    return _pass(world, _batch("cross_entropy"), changes)


def ppo(world: World, changes: Changes) -> Any:
    """`forward_backward` with PPO, the ratios far above 1."""
    return _pass(world, _batch("ppo", logprobs=floats(*[-9.0] * N), advantages=floats(*[1.0] * N)), changes)


def loss_pass(loss_fn: str) -> Probe:
    """`forward_backward` with a loss whose inputs were sampled: all that it takes, ratios below and above 1."""
    spec = LOSS_SPECS[loss_fn]
    known = {
        "logprobs": [-8.5, -7.0, -8.0, -9.0],
        "advantages": [1.0, -1.0, 2.0, 0.5],
        "sequence_ratio_mask": [1.0] * N,
    }
    inputs = {name: floats(*values) for name, values in known.items() if name in spec.required}

    def probe(world: World, changes: Changes) -> Any:
        return _pass(world, _batch(loss_fn, **inputs), changes)

    return probe


def _with_provenance(world: World, loss_fn: str) -> dict[str, Any]:
    recorded = world.record
    row = PROMPT + recorded.tokens
    n, sampled = len(PROMPT), len(recorded.tokens)
    name = recorded.sequence_id
    datum = {
        "model_input": [{"encoded_text": {"tokens": i4(*row[:-1])}}],
        "loss_fn_inputs": {"target_tokens": ints(*row[1:])},
        "model_input_spans": [
            {"prompt_tokens": {"sequence_id": name, "offset": 0, "length": n}},
            {"sampled_tokens": {"sequence_id": name, "offset": 0, "length": sampled - 1}},
        ],
        "loss_fn_input_spans": [
            {"prompt_tokens": {"sequence_id": name, "offset": 1, "length": n - 1}},
            {"sampled_tokens": {"sequence_id": name, "offset": 0, "length": sampled}},
        ],
    }
    if loss_fn == "stable_reinforce":
        advantages = [0.0] * (n - 1) + [1.0] * sampled
        datum["loss_fn_inputs"]["advantages"] = floats(*advantages)  # type: ignore[index]
    return {"data": [datum], "loss_fn": loss_fn, "loss_fn_config": {}}


def stable_reinforce(world: World, changes: Changes) -> Any:
    """`forward_backward` with the loss that looks provenance up."""
    return _pass(world, _with_provenance(world, "stable_reinforce"), changes)


def spanned(world: World, changes: Changes) -> Any:
    """`forward_backward` with provenance and a loss that has no use for it."""
    return _pass(world, _with_provenance(world, "cross_entropy"), changes)


def _json_pass(world: World, route: str, name: str, changes: Changes) -> Any:
    run = world.run()
    datum = {
        "model_input": {"chunks": [{"tokens": TOKENS[:-1], "type": "encoded_text"}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": TOKENS[1:], "dtype": "int64"},
            "logprobs": {"data": [-9.0] * N, "dtype": "float32"},
            "advantages": {"data": [1.0] * N, "dtype": "float32"},
        },
    }
    batch = {"data": [datum], "loss_fn": "ppo", "loss_fn_config": {}}
    body = world.body({name: batch, "model_id": run, "seq_id": 1}, changes)
    return _passed(world, run, world.settle(world.wire.post(route, body)))


def json_forward_backward(world: World, changes: Changes) -> Any:
    """`forward_backward` as older SDKs send it."""
    return _json_pass(world, "forward_backward", "forward_backward_input", changes)


def json_forward(world: World, changes: Changes) -> Any:
    """`forward` as older SDKs send it."""
    return _json_pass(world, "forward", "forward_input", changes)


def json_sparse(world: World, changes: Changes) -> Any:
    """A JSON `forward_backward` with two targets a token, of which sparse weights choose."""
    run = world.run()
    targets = [token for token in TOKENS[1:] for _ in (0, 1)]
    weights = {
        "data": [1.0, 0.5, 0.25, 2.0],
        "dtype": "float32",
        "shape": [N, 2],
        "sparse_crow_indices": [0, 1, 2, 3, 4],
        "sparse_col_indices": [0, 0, 0, 0],
    }
    targets[1::2] = [1500, 1501, 1502, 1503]
    datum = {
        "model_input": {"chunks": [{"tokens": TOKENS[:-1]}]},
        "loss_fn_inputs": {"target_tokens": {"data": targets, "dtype": "int64", "shape": [N, 2]}, "weights": weights},
    }
    batch = {"data": [datum], "loss_fn": "cross_entropy"}
    body = world.body({"forward_backward_input": batch, "model_id": run, "seq_id": 1}, changes)
    return _passed(world, run, world.settle(world.wire.post("forward_backward", body)))


def sparse(world: World, changes: Changes) -> Any:
    """A protobuf `forward_backward` with sparse weights."""
    csr = {"values": f4(1.0, 0.5, 0.25, 2.0), "crow_indices": i8(0, 1, 2, 3, 4), "col_indices": i8(0, 0, 0, 0)}
    targets = [token for pair in zip(TOKENS[1:], (1500, 1501, 1502, 1503), strict=True) for token in pair]
    batch = _batch("cross_entropy", weights={"sparse_csr": csr, "dtype": "DTYPE_FLOAT32", "shape": [N, 2]})
    batch["data"][0]["loss_fn_inputs"]["target_tokens"] = ints(*targets, shape=[N, 2])
    return _pass(world, batch, changes)


def custom(world: World, changes: Changes) -> Any:
    """`create_custom_loss`, and a pass with that loss."""
    nodes = [
        {"op": "placeholder", "name": "logprobs", "target": "logprobs", "args": [], "kwargs": {}},
        {"op": "placeholder", "name": "scale", "target": "scale", "args": [], "kwargs": {}},
        {"op": "call_function", "name": "scaled", "target": "operator.mul", "args": [{"ref": "logprobs"}, 2.0]},
        {"op": "call_method", "name": "total", "target": "sum", "args": [{"ref": "scaled"}], "kwargs": {"dim": 0}},
        {
            "op": "output",
            "name": "output",
            "target": "output",
            "args": [{"tuple": [{"ref": "total"}, {"dict": {"custom/total:sum": {"ref": "total"}}}]}],
        },
    ]
    base = {
        "session_id": world.session,
        "custom_loss_seq_id": world.serial(),
        "name": "mine",
        "inputs": [{"name": "logprobs", "rank": 1}, {"name": "scale", "rank": 1}],
        "graph": {"format": 1, "nodes": nodes},
        "type": "create_custom_loss",
    }
    upload = {path: value for path, value in changes.items() if not path.startswith("pass.")}
    created = world.settle(world.wire.post("create_custom_loss", world.body(base, upload)))
    if isinstance(created, Refusal):
        return created
    batch = _batch("custom", scale=floats(*[1.0] * N))
    batch["loss_fn_config_v2"] = {"loss_id": {"text": created["loss_id"]}}
    used = {path.removeprefix("pass."): value for path, value in changes.items() if path.startswith("pass.")}
    return _pass(world, batch, used)
