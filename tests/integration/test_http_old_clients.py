"""What SDKs before 0.25 send and read: batches and results in JSON, nulls, defaults left out, `unload_model`."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import redis
import zstandard

from app.runs.log import UNLOADED_SEQ
from app.runs.models import Run
from app.sampling.store import SampleAnswer, SampleDesk
from app.wire.sampling import encode_result
from app.wire.training import encode_output
from app.wire.types import ForwardBackwardOutput, SampledSequence, SampleResult
from tests.factories import POOL, VOCABULARY, add_checkpoint
from tests.integration.conftest import PROTOBUF, Api

Batch = Callable[..., bytes]
BOTH = f"{PROTOBUF}, application/json"


def batch_json(model_id: str, seq_id: int, *tokens: int, name: str = "forward_backward_input", **fields: Any) -> Any:
    """The same batch as the fixture `batch` makes."""
    values = list(tokens or (1, 2, 3))
    targets = {"data": values, "dtype": "int64"}
    datum = {"model_input": {"chunks": [{"tokens": values}]}, "loss_fn_inputs": {"target_tokens": targets}}
    return {name: {"data": [datum], "loss_fn": "cross_entropy"} | fields, "model_id": model_id, "seq_id": seq_id}


def failure(api: Api, model_id: str, seq_id: int) -> str:
    answer = api.poll(f"{model_id}:{seq_id}").json()
    assert answer["category"] == "user"
    return str(answer["error"])


def retrieve(api: Api, request_id: str, **headers: str) -> httpx.Response:
    """A poll of an old client, which says nothing of metadata."""
    return api.post("retrieve_future", {"request_id": request_id}, **headers)


# -- batches in JSON


def test_a_batch_in_json_is_the_same_operation_as_in_protobuf(each_api: Api, batch: Batch) -> None:
    model_id = each_api.run()
    future = each_api.ok("forward_backward", batch_json(model_id, 1))
    assert future["request_id"] == f"{model_id}:1"
    row = each_api.operation(model_id, 1)
    assert (row.kind, row.state, row.tokens, row.body) == ("forward_backward", "accepted", 3, batch(model_id, 1))
    assert each_api.forward_backward(batch(model_id, 1)).json() == future


def test_a_forward_has_a_route_of_its_own(api: Api) -> None:
    model_id = api.run()
    api.ok("forward", batch_json(model_id, 1, name="forward_input"))
    assert api.operation(model_id, 1).kind == "forward"


def test_a_compressed_batch_in_json_equals_a_plain_one(api: Api) -> None:
    model_id = api.run()
    packed = zstandard.ZstdCompressor().compress(json.dumps(batch_json(model_id, 1)).encode())
    assert api.ok("forward_backward", packed, content_encoding="zstd") == api.ok(
        "forward_backward", batch_json(model_id, 1)
    )


def test_a_batch_in_json_that_unfolds_over_the_limit_is_too_large(api: Api) -> None:
    bomb = zstandard.ZstdCompressor().compress(b" " * (257 << 20))
    assert api.post("forward_backward", bomb, content_encoding="zstd").status_code == 413


def test_a_batch_in_json_that_would_fill_the_memory_is_too_large(api: Api) -> None:
    lists = zstandard.ZstdCompressor().compress(b"[" + b"[]," * (23 << 20) + b"1]")
    assert api.post("forward_backward", lists, content_encoding="zstd").status_code == 413


def test_another_batch_in_json_with_the_same_number_is_a_conflict(api: Api) -> None:
    model_id = api.run()
    api.ok("forward_backward", batch_json(model_id, 1))
    assert api.post("forward_backward", batch_json(model_id, 1, 9, 9)).status_code == 409


BAD: dict[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "token": ((1, VOCABULARY), {}, f"data[0].model_input: token {VOCABULARY} is outside"),
    "unknown": ((), {"seed": 1}, "forward_backward_input.seed: unknown field"),
    "no batch": ((), {"data": None}, "forward_backward_input.data: missing"),
    "config": ((), {"loss_fn_config": {"beta": float("nan")}}, "loss_fn_config['beta']: unknown"),
    "chunk": ((), {"data": [{"model_input": {"chunks": [{"type": "image"}]}, "loss_fn_inputs": {}}]}, "image chunks"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_batch_in_json_fails_in_its_place_and_the_next_goes_on(api: Api, case: str) -> None:
    tokens, fields, words = BAD[case]
    model_id = api.run()
    bad = batch_json(model_id, 1, *tokens, **fields)
    futures = [api.ok("forward_backward", bad) for _ in range(2)]
    assert futures[0] == futures[1]
    api.ok("forward_backward", batch_json(model_id, 2))
    assert words in failure(api, model_id, 1)
    assert api.operation(model_id, 2).state == "accepted"


def test_a_step_with_nan_fails_in_its_place(api: Api) -> None:
    model_id = api.run()
    api.ok("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": float("nan")}})
    assert "adam_params.learning_rate" in failure(api, model_id, 1)


def test_a_batch_in_json_without_a_place_is_refused_at_once(api: Api) -> None:
    answers = [
        api.post("forward_backward", b"{"),
        api.post("forward_backward", b"\xff"),
        api.post("forward", []),
        api.post("forward", {"model_id": "m"}),
        api.post("forward", batch_json("m", 1), content_type=PROTOBUF),
        api.post("forward_backward", batch_json("m", 1), content_type="text/plain"),
    ]
    assert [answer.status_code for answer in answers] == [400] * 6
    assert api.post("forward", batch_json(api.run("bob"), 1, name="forward_input")).status_code == 404


# -- results in JSON


def test_a_passs_result_is_json_for_those_who_do_not_accept_protobuf(api: Api) -> None:
    model_id = api.run()
    api.ok("forward_backward", batch_json(model_id, 1))
    output = ForwardBackwardOutput([{"logprobs": np.array([-1, -2], np.float32)}], {"loss:sum": 3.0})
    api.finish(model_id, 1, kind="proto", result=encode_output(output))
    for headers in ({}, {"accept": "application/json"}, {"accept": "*/*"}):
        answer = retrieve(api, f"{model_id}:1", **headers)
        assert answer.headers["content-type"] == "application/json"
        assert answer.headers["content-length"] == str(len(answer.content))
        assert answer.json() == {
            "loss_fn_output_type": "ArrayRecord",
            "loss_fn_outputs": [{"logprobs": {"dtype": "float32", "shape": [2], "data": [-1.0, -2.0]}}],
            "metrics": {"loss:sum": 3.0},
        }
    for accept in (PROTOBUF, BOTH):
        assert retrieve(api, f"{model_id}:1", accept=accept).content == encode_output(output)


def test_a_sample_is_json_for_those_who_do_not_accept_protobuf(api: Api, redis_url: str) -> None:
    body: dict[str, Any] = {"session_id": api.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = api.ok("create_sampling_session", body)["sampling_session_id"]
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1, 2]}]}}
    request_id = api.ok("asample", body)["request_id"]
    sequence = SampledSequence("length", np.array([5], np.int32), np.array([-1], np.float32))
    result = encode_result(SampleResult([sequence], prompt_logprobs=np.array([np.nan, -2], np.float32)))
    with redis.Redis.from_url(redis_url) as client:
        desk = SampleDesk(client, pool=POOL, worker_id="w", claim_s=60, result_ttl_s=900)
        desk.finish([(request_id, SampleAnswer("proto", result))])
    assert retrieve(api, request_id).json() == {
        "type": "sample",
        "sequences": [{"stop_reason": "length", "tokens": [5], "logprobs": [-1.0]}],
        "prompt_logprobs": [None, -2.0],
        "prompt_cache_hit_tokens": 0,
    }
    assert retrieve(api, request_id, accept=BOTH).content == result


# -- nulls, and what is left out


def test_nulls_are_as_good_as_nothing(api: Api) -> None:
    session_id = str(
        api.ok("create_session", {"tags": None, "user_metadata": None, "sdk_version": "0.10.0"})["session_id"]
    )
    lora = {"rank": 4, "seed": None, "train_unembed": None}
    created = api.create(session_id, lora_config=lora, user_metadata=None, optimizer_config=None, type=None)
    model_id = created["model_id"]
    api.finish(model_id, 0)
    place = {"model_id": model_id, "type": None}
    api.ok("optim_step", place | {"seq_id": 1, "adam_params": {"learning_rate": 1e-3, "beta1": None}})
    api.ok("save_weights", place | {"seq_id": 2, "path": "a", "ttl_seconds": None, "overwrite": None})
    ephemeral = {"path": None, "sampling_session_seq_id": 0, "kind": None, "user_metadata": None}
    api.ok("save_weights_for_sampler", place | {"seq_id": 3} | ephemeral)
    with api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, model_id))
    load = {"path": f"tinker://{model_id}/weights/first", "optimizer": True, "weights_access_token": None}
    api.ok("load_weights", place | {"seq_id": 4, "session_id": None, "model_seq_id": None} | load)
    api.ok("load_weights", {"model_id": None, "seq_id": None, "session_id": session_id, "model_seq_id": 1} | load)
    api.ok("forward_backward", batch_json(model_id, 5, loss_fn_config=None))
    assert [api.operation(model_id, seq_id).error for seq_id in range(1, 6)] == [None] * 5
    assert api.operation(f"{session_id}:train:1", 0).error is None
    assert json.loads(api.operation(model_id, 1).body or b"")["beta1"] == 0.9


def test_a_sample_of_an_old_client_is_taken(api: Api) -> None:
    body: dict[str, Any] = {"session_id": api.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = api.ok("create_sampling_session", body | {"model_path": None})["sampling_session_id"]
    chunk = {"tokens": [1, 2]}
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": None,
        "prompt": {"chunks": [chunk]},
        "sampling_params": {"max_tokens": 2, "seed": None, "stop": None, "top_p": None},
        "base_model": None,
        "model_path": None,
        "prompt_logprobs": None,
        "topk_prompt_logprobs": None,
    }
    api.ok("asample", body)


def test_null_where_a_field_is_required_is_still_wrong(api: Api) -> None:
    assert "session_id" in api.post("session_heartbeat", {"session_id": None}).json()["detail"]


def test_null_where_it_means_something_keeps_its_meaning(api: Api) -> None:
    model_id = api.run()
    with api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, model_id))
    path = f"training_runs/{model_id}/checkpoints/weights/first/ttl"
    assert api.send("PUT", path, {"ttl_seconds": 3600}).status_code < 300
    assert api.send("PUT", path, {}).status_code == 422
    assert api.send("PUT", path, {"ttl_seconds": None}).status_code < 300
    assert api.seen(f"training_runs/{model_id}/checkpoints")["checkpoints"][0]["expires_at"] is None


def test_clients_are_told_that_a_run_may_begin_as_a_checkpoint(api: Api) -> None:
    assert api.ok("client/config", {"sdk_version": "0.30.4"})["create_model_via_load_weights"] is True


# -- unload_model


def test_an_unloaded_run_takes_no_more_operations(each_api: Api, batch: Batch) -> None:
    model_id = each_api.run()
    each_api.forward_backward(batch(model_id, 1))
    future = each_api.ok("unload_model", {"model_id": model_id, "type": "unload_model"})
    assert each_api.ok("unload_model", {"model_id": model_id}) == future
    assert retrieve(each_api, future["request_id"]).json() == {"type": "unload_model", "model_id": model_id}
    each_api.ok("optim_step", {"model_id": model_id, "seq_id": 2, "adam_params": {}})
    assert f"{model_id!r} was unloaded" in failure(each_api, model_id, 2)
    assert each_api.operation(model_id, 1).state == "accepted"
    assert each_api.forward_backward(batch(model_id, 1)).status_code == 200  # a repeat is still the same future
    assert each_api.ok("get_info", {"model_id": model_id})["model_id"] == model_id


def test_unloading_at_once_is_one_unloading(each_api: Api) -> None:
    model_id = each_api.run()
    with ThreadPoolExecutor(4) as pool:
        futures = list(pool.map(lambda _: each_api.ok("unload_model", {"model_id": model_id}), range(4)))
    assert all(future == futures[0] for future in futures)
    assert each_api.operation(model_id, UNLOADED_SEQ).kind == "unload_model"


def test_what_an_unloaded_run_is_sent_leaves_no_blob(api: Api, tmp_path: Any) -> None:
    model_id = api.run()
    api.ok("unload_model", {"model_id": model_id})
    batch = batch_json(model_id, 1)
    batch["forward_backward_input"]["data"] *= 2000
    api.ok("forward_backward", batch)
    assert api.operation(model_id, 1).body_blob is None
    assert [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()] == []


def test_somebody_elses_run_cannot_be_unloaded(api: Api) -> None:
    theirs = api.run("bob")
    assert api.post("unload_model", {"model_id": theirs}).status_code == 404
    api.ok("optim_step", {"model_id": theirs, "seq_id": 1, "adam_params": {}}, who="bob")
    assert api.operation(theirs, 1).state == "accepted"
