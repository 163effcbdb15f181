"""Sampling requests, saves and polls with some fields changed, and what can be seen afterwards."""

from __future__ import annotations

import time
from typing import Any

import httpx
import numpy as np
import zstandard

from app.wire import tinker_pb2 as pb
from tests.e2e.field_world import MORE_ROWS, PROMPT, PROTOBUF, ROWS, Changes, Refusal, World

LONGER = [5, 9, 200, 31, 7, 12]
HELD_S = 0.4
SPARSE = {
    "data": [9, 31, 7],
    "dtype": "int64",
    "shape": [5, 2],
    "sparse_crow_indices": [0, 1, 2, 3, 3, 3],
    "sparse_col_indices": [0, 0, 0],
}


def _topk(table: pb.TopkLogprobs) -> list[Any]:
    return [table.k, table.length, np.frombuffer(table.token_ids, "<i4"), np.frombuffer(table.logprobs, "<f4")]


def decoded_sample(payload: bytes) -> dict[str, Any]:
    """The result of a sample, without how much of its prompt was cached."""
    message = pb.SampleResponse.FromString(payload)
    targets = message.target_prompt_logprobs
    return {
        "sequences": [
            {
                "stop_reason": sequence.stop_reason,
                "tokens": np.frombuffer(sequence.tokens, "<i4"),
                "logprobs": np.frombuffer(sequence.logprobs, "<f4"),
                "topk": _topk(sequence.topk_sampled_logprobs),
            }
            for sequence in message.sequences
        ],
        "prompt": np.frombuffer(message.prompt_logprobs, "<f4"),
        "topk": _topk(message.topk_prompt_logprobs),
        "targets": [list(targets.shape), targets.dense, targets.sparse_csr.SerializeToString()],
        "alternatives": list(message.prompt_alt_tokens.tokens.shape),
    }


def sample(world: World, changes: Changes) -> Any:
    """`asample` of the base model."""
    base = {
        "prompt": {"chunks": [{"tokens": LONGER, "type": "encoded_text"}]},
        "sampling_params": {"max_tokens": 4, "seed": 1, "stop": [], "temperature": 1.0, "top_k": -1, "top_p": 1.0},
        "num_samples": 1,
        "sampling_session_id": world.sampler,
        "seq_id": world.serial(),
        "type": "sample",
    }
    outcome = world.settle(world.wire.post("asample", world.body(base, changes)))
    return outcome if isinstance(outcome, Refusal) else decoded_sample(outcome)


def scored(world: World, changes: Changes) -> Any:
    """`asample` that scores tokens in the places of its prompt's."""
    targets = {"data": [9, 200, 31, 7, 12], "dtype": "int64", "shape": [5, 1]}
    return sample(world, {"target_prompt_logprobs": targets, **changes})


def scored_sparsely(world: World, changes: Changes) -> Any:
    """The same for some places only."""
    return sample(world, {"target_prompt_logprobs": SPARSE, **changes})


def sampling_session(world: World, changes: Changes) -> Any:
    """`create_sampling_session`: what it samples from."""
    base = {
        "session_id": world.session,
        "sampling_session_seq_id": world.serial(),
        "base_model": "tiny",
        "type": "create_sampling_session",
    }
    made = world.json(world.wire.post("create_sampling_session", world.body(base, changes)))
    if isinstance(made, Refusal):
        return made
    name = made["sampling_session_id"]
    told = world.get(f"samplers/{name}")
    number = {"id": name} if "sampling_session_seq_id" in changes else {}
    return number | {"model_path": told["model_path"], "logprobs": prompt_logprobs(world, name)}


def prompt_logprobs(world: World, sampler: str) -> np.ndarray:
    """What a sampler's weights give a prompt."""
    return sample(world, {"sampling_session_id": sampler, "prompt_logprobs": True})["prompt"][1:]


def join(world: World, changes: Changes) -> Any:
    """`join_sampling_session`: whether a number was given."""
    base = {"sampling_session_id": world.sampler, "type": "join_sampling_session"}
    joined = world.json(world.wire.post("join_sampling_session", world.body(base, changes)))
    return joined if isinstance(joined, Refusal) else joined["client_counter"] > 0


# -- saves


def _save(world: World, route: str, changes: Changes) -> Any:
    """A named save of a trained run: its entry in the catalogue."""
    assert world.weights and world.taken  # they take their places in the sequence first
    name = f"n{world.serial()}"
    base = {"model_id": world.trained.run, "seq_id": world.trained.seq_id, "path": name, "type": route}
    answer = world.wire.post(route, world.body(base, changes))
    if answer.status_code == 200:  # otherwise no place in the run's sequence was taken
        world.trained.next()
    saved = world.settle(answer)
    if isinstance(saved, Refusal):
        return saved
    listed = world.get(f"training_runs/{world.trained.run}/checkpoints")["checkpoints"]
    entry = next(each for each in listed if each["tinker_path"] == saved["path"])
    return {
        "path": saved["path"].replace(name, "NAME"),
        "metadata": entry["user_metadata"],
        "expires": (entry["expires_at"] or "")[:13],
    }


def save_weights(world: World, changes: Changes) -> Any:
    """`save_weights`."""
    return _save(world, "save_weights", changes)


def save_named_sampler(world: World, changes: Changes) -> Any:
    """`save_weights_for_sampler` with a name."""
    assert world.sampler_weights
    return _save(world, "save_weights_for_sampler", changes)


def save_external(world: World, changes: Changes) -> Any:
    """`save_weights_external`, and the names of the files that can be downloaded."""
    saved = _save(world, "save_weights_external", {"path": f"x{world.serial()}", **changes})
    if isinstance(saved, Refusal):
        return saved
    name = saved["path"].rpartition("/")[2]
    urls = world.get(f"training_runs/{world.trained.run}/checkpoints/external_weights/{name}/external_weights_urls")
    kept = {key: value for key, value in saved.items() if key != "path" or "path" in changes}
    return kept | {"files": sorted(urls["urls"])}


def save_ephemeral(world: World, changes: Changes) -> Any:
    """`save_weights_for_sampler` without a name: what its sampler gives, then and after another step and save."""
    run = world.run()
    world.step(run, 1)

    def save(seq_id: int, changes: Changes) -> Any:
        base = {
            "model_id": run,
            "seq_id": seq_id,
            "sampling_session_seq_id": world.serial(),
            "kind": "snapshot",
            "type": "save_weights_for_sampler",
        }
        return world.settle(world.wire.post("save_weights_for_sampler", world.body(base, changes)))

    saved = save(3, changes)
    if isinstance(saved, Refusal):
        return saved
    sampler = saved["sampling_session_id"]
    before = prompt_logprobs(world, sampler)
    world.step(run, 4, MORE_ROWS)
    save(6, {key: value for key, value in changes.items() if key == "kind"})
    number = {"id": sampler} if "sampling_session_seq_id" in changes else {}
    return number | {"before": before, "after": prompt_logprobs(world, sampler)}


# -- polls


def _poll(world: World, request_id: str, changes: Changes, accept: str = PROTOBUF) -> httpx.Response:
    body = world.body({"request_id": request_id, "allow_metadata_only": False}, changes)
    return world.wire.http.post("retrieve_future", json=body, headers={"Accept": accept})


def retrieve(world: World, changes: Changes) -> Any:
    """`retrieve_future` of a large result: its size, or that it was only announced."""
    request_id = world.large_result
    said = world.result(_poll(world, request_id, changes))
    return len(said) if isinstance(said, bytes) else said


def retrieve_as(world: World, changes: Changes) -> Any:
    """`retrieve_future` of a sample: the form of the answer to an Accept header."""
    body = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {"max_tokens": 1}}
    body |= {"sampling_session_id": world.sampler, "seq_id": world.serial()}
    request_id = world.wire.post("asample", body).json()["request_id"]
    world.wire.wait(request_id)
    return _poll(world, request_id, {}, changes["accept"]).headers["content-type"]


def retrieve_futures(world: World, changes: Changes) -> Any:
    """`retrieve_futures` of a client after a sample of its: how many are told, and whether that took a while."""
    sampler = world.sampler_of(base_model="tiny")
    base = {
        "target": {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0},
        "prev_cursor": 0,
        "timeout": 0.0,
        "retrieved_request_ids": [],
    }
    for client in (0, 1):
        world.wire.post("retrieve_futures", world.body(base, {"target.cloned_sampler_id": client}))
    body = {"prompt": {"chunks": [{"tokens": PROMPT}]}, "sampling_params": {"max_tokens": 1}}
    request_id = world.wire.post("asample", body | {"sampling_session_id": sampler, "seq_id": 0}).json()["request_id"]
    world.wire.wait(request_id)
    told = world.wire.post("retrieve_futures", base).json()
    if changes.get("prev_cursor") == "last":
        changes = {**changes, "prev_cursor": told["cursor"]}
    began = time.monotonic()
    answer = world.json(world.wire.post("retrieve_futures", world.body(base, changes)))
    if isinstance(answer, Refusal):
        return answer
    return {"told": len(answer["completions"]), "held": time.monotonic() - began > HELD_S}


def cancel(world: World, changes: Changes) -> Any:
    """`cancel_future` of a sample that would go on for long."""
    body = {
        "prompt": {"chunks": [{"tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 1500, "stop": []},
        "sampling_session_id": world.sampler,
        "seq_id": world.serial(),
    }
    request_id = world.wire.post("asample", body).json()["request_id"]
    cancelled = world.json(world.wire.post("cancel_future", world.body({"request_id": request_id}, changes)))
    if isinstance(cancelled, Refusal):
        world.wire.post("cancel_future", {"request_id": request_id})
    return cancelled


def forward_backward_in(world: World, changes: Changes) -> Any:
    """`forward_backward` with an encoding of its body."""
    run = world.run()
    content = world.wire.message(run, 1, ROWS).SerializeToString()
    if changes["packed"]:
        content = zstandard.ZstdCompressor().compress(content)
    headers = {"Content-Type": changes["type"], "Content-Encoding": changes["encoding"]}
    outcome = world.settle(world.wire.http.post("forward_backward", content=content, headers=headers))
    return outcome if isinstance(outcome, Refusal) else "accepted"
