"""Training requests over HTTP: a place in the log for every one that can be read, and failures in the user's words."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis
import zstandard
from sqlalchemy import func, select, update
from tinker.proto import tinker_public_pb2 as sdk

from app.db import database_clock, utc_now
from app.runs.models import Operation, Run
from tests.factories import VOCABULARY, add_checkpoint
from tests.integration.conftest import Api
from tests.services import wait_for

Batch = Callable[..., bytes]
SAVE = {"path": "first", "type": "save_weights"}


def step(api: Api, model_id: str, seq_id: int, **fields: object) -> dict[str, Any]:
    return api.ok("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}} | fields)


def failure(api: Api, model_id: str, seq_id: int) -> str:
    """The text of an operation that failed by its user's fault."""
    answer = api.poll(f"{model_id}:{seq_id}")
    assert answer.status_code == 200
    assert answer.json()["category"] == "user"
    return str(answer.json()["error"])


# -- runs


def test_a_run_has_the_id_that_the_client_computes(api: Api) -> None:
    session_id = api.session()
    created = api.create(session_id, 3)
    assert created["model_id"] == f"{session_id}:train:3"
    assert api.operation(created["model_id"], 0).kind == "create_model"


def test_a_repeated_creation_is_the_same_future(each_api: Api) -> None:
    session_id = each_api.session()
    assert each_api.create(session_id) == each_api.create(session_id)


def test_creations_at_once_are_one_run(each_api: Api) -> None:
    for _ in range(3):
        session_id = each_api.session()
        with ThreadPoolExecutor(6) as pool:
            futures = list(pool.map(lambda _, s=session_id: each_api.create(s)["request_id"], range(6)))
        assert len(set(futures)) == 1


def test_a_creation_with_another_content_is_a_conflict(api: Api) -> None:
    session_id = api.session()
    api.create(session_id)
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 8}}
    assert api.post("create_model", body).status_code == 409


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"base_model": "no/such-model"}, "base_model: no worker serves 'no/such-model'"),
        ({"lora_config": None}, "lora_config: missing"),
        ({"lora_config": {"rank": 4096}}, "lora_config.rank: 4096 exceeds"),
        ({"lora_config": {"rank": 4, "alpha": 1}}, "lora_config.alpha: unknown field"),
        ({"optimizer_config": {"type": "sgd"}}, "optimizer_config.type: Input should be 'adamw' or 'dimuon'"),
        ({"optimizer_config": {"type": "dimuon", "version": 2}}, "optimizer_config.version: Input should be 1"),
        ({"optimizer_config": {"type": "adamw", "version": 1}}, "optimizer_config: version: adamw has none"),
        ({"base_modle": "tiny"}, "base_modle: unknown field"),
    ],
)
def test_a_creation_that_cannot_be_is_a_failed_future(api: Api, fields: dict[str, object], words: str) -> None:
    created = api.create(api.session(), **fields)
    assert words in failure(api, created["model_id"], 0)


def test_operations_on_a_run_that_was_not_created_fail_in_their_place(api: Api) -> None:
    model_id = api.create(api.session(), base_model="no/such-model")["model_id"]
    step(api, model_id, 1)
    assert "its creation failed" in failure(api, model_id, 1)


def test_a_run_is_described_to_its_owner(api: Api) -> None:
    model_id = api.run()
    info = api.ok("get_info", {"model_id": model_id})
    assert (info["model_id"], info["lora_rank"], info["is_lora"]) == (model_id, 4, True)
    assert info["model_data"]["model_name"] == "tiny"
    assert info["optimizer_config"] == {"type": "adamw"}


# -- somebody else's


def test_somebody_elses_run_is_not_there(api: Api, batch: Batch) -> None:
    theirs = api.run("bob")
    for model_id in (theirs, f"{api.session()}:train:9", "never-was"):
        place = {"model_id": model_id, "seq_id": 1}
        answers = [
            api.post("get_info", {"model_id": model_id}),
            api.post("optim_step", place | {"adam_params": {}}),
            api.post("save_weights", place | SAVE),
            api.post("save_weights_for_sampler", place | SAVE),
            api.post("load_weights", place | {"path": "tinker://x/weights/y", "optimizer": True}),
            api.forward_backward(batch(model_id, 1)),
        ]
        assert [answer.status_code for answer in answers] == [404] * 6
    assert operation_count(api, theirs) == 1


def operation_count(api: Api, model_id: str) -> int:
    with api.database.read() as session:
        query = select(func.count()).select_from(Operation).where(Operation.model_id == model_id)
        return session.scalar(query) or 0


def test_a_run_in_somebody_elses_session_cannot_be_made(api: Api) -> None:
    body = {"session_id": api.session("bob"), "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    assert api.post("create_model", body).status_code == 404


def test_a_known_run_is_still_only_its_owners(api: Api, batch: Batch) -> None:
    theirs = api.run("bob")
    assert api.forward_backward(batch(theirs, 1), who="bob").status_code == 200  # what is remembered of it now
    assert api.forward_backward(batch(theirs, 2)).status_code == 404


def test_somebody_elses_checkpoint_is_not_there(api: Api) -> None:
    theirs, mine = api.run("bob"), api.run()
    with api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, theirs))
    body = {"model_id": mine, "seq_id": 1, "path": f"tinker://{theirs}/weights/first", "optimizer": True}
    api.ok("load_weights", body)
    assert "path: there is no checkpoint" in failure(api, mine, 1)


# -- operations


def test_a_batch_is_stored_as_it_came(api: Api, batch: Batch) -> None:
    model_id = api.run()
    body = batch(model_id, 1, 5, 6, 7)
    answer = api.forward_backward(body).json()
    assert answer["request_id"] == f"{model_id}:1"
    row = api.operation(model_id, 1)
    assert (row.kind, row.state, row.tokens) == ("forward_backward", "accepted", 3)


def test_a_forward_is_known_by_its_kind(api: Api, batch: Batch) -> None:
    model_id = api.run()
    api.forward_backward(batch(model_id, 1, forward_only=True))
    assert api.operation(model_id, 1).kind == "forward"


def test_a_compressed_batch_equals_a_plain_one(api: Api, batch: Batch) -> None:
    model_id = api.run()
    packed = zstandard.ZstdCompressor().compress(batch(model_id, 1))
    first = api.forward_backward(packed, content_encoding="zstd")
    assert first.status_code == 200
    assert api.forward_backward(batch(model_id, 1)).json() == first.json()


def test_a_repeated_batch_is_the_same_future(each_api: Api, batch: Batch) -> None:
    model_id = each_api.run()
    answers = [each_api.forward_backward(batch(model_id, 1)).json() for _ in range(3)]
    assert answers[0] == answers[1] == answers[2]
    assert operation_count(each_api, model_id) == 2


def test_equal_batches_at_once_are_one_operation(each_api: Api, batch: Batch) -> None:
    model_id = each_api.run()
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: each_api.forward_backward(batch(model_id, 1)), range(6)))
    assert {answer.status_code for answer in answers} == {200}
    assert operation_count(each_api, model_id) == 2


def test_another_batch_with_the_same_number_is_a_conflict(api: Api, batch: Batch) -> None:
    model_id = api.run()
    api.forward_backward(batch(model_id, 1))
    assert api.forward_backward(batch(model_id, 1, 9, 9)).status_code == 409


def test_a_retried_ephemeral_save_with_another_sampler_number_is_the_same_future(api: Api) -> None:
    model_id = api.run()
    body = {"model_id": model_id, "seq_id": 1, "kind": "snapshot"}
    first = api.ok("save_weights_for_sampler", body | {"sampling_session_seq_id": 0})
    assert api.ok("save_weights_for_sampler", body | {"sampling_session_seq_id": 1}) == first
    assert b'"sampling_session_seq_id":0' in (api.operation(model_id, 1).body or b"")


def test_a_large_batch_is_stored_once_however_often_it_is_sent(api: Api, batch: Batch, tmp_path: Path) -> None:
    model_id = api.run()
    body = batch(model_id, 1, *[1] * 20, loss_fn_config={f"{n:04}{'x' * 1000}": 0.0 for n in range(100)})
    assert len(body) > 64 * 2**10
    assert [api.forward_backward(body).status_code for _ in range(3)] == [200] * 3
    good = batch(model_id, 2, *[1] * 20)
    many = b"".join([good, *[datum(good)] * 1000])
    assert [api.forward_backward(many).status_code for _ in range(3)] == [200] * 3
    assert api.operation(model_id, 2).body_blob is not None
    assert len(list((tmp_path / "blobs").rglob("*/*"))) == 1


def test_a_large_batch_that_is_refused_leaves_no_blob(api: Api, batch: Batch, tmp_path: Path) -> None:
    model_id = api.run()
    good = batch(model_id, 1, *[1] * 20)
    assert api.forward_backward(good).status_code == 200
    many = b"".join([good, *[datum(good)] * 1000])
    assert api.forward_backward(many).status_code == 409
    finished = {"reason": {"type": "success"}, "detail": None}
    assert api.post(f"sessions/{model_id.partition(':')[0]}/finish", finished).status_code == 200
    assert api.forward_backward(many).status_code == 410
    assert list((tmp_path / "blobs").rglob("bodies/*")) == []


def datum(body: bytes) -> bytes:
    """The first datum of a request, as one more entry of the list."""
    request = sdk.ForwardBackwardRequest.FromString(body)
    return bytes(sdk.ForwardBackwardRequest(data=[request.data[0]]).SerializeToString())


BAD_BATCHES: dict[str, tuple[dict[str, object], tuple[int, ...], str]] = {
    "token": ({}, (1, VOCABULARY), f"data[0].model_input: token {VOCABULARY} is outside"),
    "length": ({}, (1,) * 33, "data[0].model_input: 33 tokens exceed the context of 32"),
    "config": ({"loss_fn_config": {"beta": 1.0}}, (1,), "loss_fn_config['beta']: unknown to cross_entropy"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_bad_batch_fails_in_its_place_and_the_next_goes_on(api: Api, batch: Batch, case: str) -> None:
    fields, tokens, words = BAD_BATCHES[case]
    model_id = api.run()
    assert api.forward_backward(batch(model_id, 1, *tokens, **fields)).status_code == 200
    assert api.forward_backward(batch(model_id, 2)).status_code == 200
    assert words in failure(api, model_id, 1)
    assert api.operation(model_id, 2).state == "accepted"


BAD_JSON: dict[str, tuple[str, dict[str, object], str]] = {
    "step": ("optim_step", {"adam_params": {"beta1": 2}}, "adam_params.beta1"),
    "other optimizer": ("optim_step", {"optimizer_params": {"type": "dimuon"}}, "optimizer_params: "),
    "unknown field": ("optim_step", {"adam_params": {}, "momentum": 1}, "momentum: unknown field"),
    "name": ("save_weights", {"path": "a/b"}, "path"),
    "life": ("save_weights", {"path": "a", "ttl_seconds": 1}, "ttl_seconds"),
    "both forms": ("save_weights_for_sampler", {"path": "a", "sampling_session_seq_id": 1}, "exactly one of"),
    "path": ("load_weights", {"path": "weights/a", "optimizer": True}, "path: 'weights/a' is not of the form"),
    "no checkpoint": ("load_weights", {"path": "tinker://a/weights/b", "optimizer": True}, "path: there is no"),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_a_bad_request_fails_in_its_place(api: Api, case: str) -> None:
    path, fields, words = BAD_JSON[case]
    model_id = api.run()
    api.ok(path, {"model_id": model_id, "seq_id": 1} | fields)
    assert words in failure(api, model_id, 1)
    step(api, model_id, 2)
    assert api.operation(model_id, 2).state == "accepted"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "body: not valid JSON"),
        ([], "body: must be a JSON object"),
        ({"seq_id": 1}, "model_id: missing"),
        ({"model_id": "m"}, "seq_id: must be"),
        ({"model_id": "m", "seq_id": 0}, "seq_id: must be"),
        ({"model_id": "m", "seq_id": True}, "seq_id: must be"),
        ({"model_id": "m", "seq_id": 2**31}, "seq_id: must be"),
    ],
)
def test_a_request_without_a_place_is_refused_at_once(api: Api, body: object, words: str) -> None:
    answer = api.post("optim_step", body)
    assert answer.status_code == 400
    assert words in answer.json()["detail"]


def test_a_batch_that_is_no_protobuf_is_refused(api: Api, batch: Batch) -> None:
    assert api.forward_backward(b"\xff\xff").status_code == 400
    assert api.post("forward_backward", batch("m", 1)).status_code == 400
    assert api.forward_backward(batch("m", 1), content_encoding="br").status_code == 400
    assert api.forward_backward(batch("m", 1), content_encoding="zstd").status_code == 400


def test_a_batch_that_unfolds_over_the_limit_is_too_large(api: Api) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(257 << 20))
    answer = api.forward_backward(bomb, content_encoding="zstd")
    assert answer.status_code == 413


def test_a_run_made_of_a_checkpoint_has_its_shape(api: Api) -> None:
    source = api.run()
    with api.database.write() as session:
        row = session.get_one(Run, source)
        row.lora_rank = 2
        add_checkpoint(session, row)
    session_id = api.session()
    body = {"session_id": session_id, "model_seq_id": 0, "path": f"tinker://{source}/weights/first", "optimizer": True}
    created = api.ok("load_weights", body)
    assert created["model_id"] == f"{session_id}:train:0"
    assert api.operation(created["model_id"], 0).kind == "load_weights"
    assert api.ok("get_info", {"model_id": created["model_id"]})["lora_rank"] == 2


def test_a_checkpoint_that_has_expired_cannot_be_loaded(api: Api) -> None:
    model_id = api.run()
    with api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, model_id), expires_at=utc_now())
    body = {"model_id": model_id, "seq_id": 1, "path": f"tinker://{model_id}/weights/first", "optimizer": True}
    api.ok("load_weights", body)
    assert "there is no checkpoint" in failure(api, model_id, 1)


# -- what no client sends by mistake


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


NUL = "a\0b"
HOSTILE: dict[str, tuple[str, object]] = {
    "deep": ("create_model", {"session_id": "s", "model_seq_id": 0, "user_metadata": {"x": nested(400)}}),
    "deep in a step": ("optim_step", {"model_id": "{run}", "seq_id": 1, "x": nested(400)}),
    "nul in a run": ("optim_step", {"model_id": NUL, "seq_id": 1}),
    "nul in a session": ("session_heartbeat", {"session_id": NUL}),
    "nul in a new run": ("create_model", {"session_id": NUL, "model_seq_id": 0, "base_model": "tiny"}),
    "nul in a model": ("create_model", {"session_id": "{session}", "model_seq_id": 0, "base_model": NUL}),
    "nul in a name": ("create_session", {"display_name": NUL}),
    "nul in a reason": ("sessions/{session}/finish", {"reason": {"type": "success"}, "detail": NUL}),
    "nul in a future": ("retrieve_future", {"request_id": NUL}),
    "nul in a sample's future": ("retrieve_future", {"request_id": f"{NUL}:sample:0:0"}),
    "nul in a sampler": ("asample", {"sampling_session_id": NUL, "seq_id": 0, "prompt": {"chunks": [{"tokens": [1]}]}}),
    "nul in a checkpoint": (
        "load_weights",
        {"model_id": "{run}", "seq_id": 1, "path": f"tinker://{NUL}/weights/a", "optimizer": True},
    ),
    "nul in a sampled model": (
        "create_sampling_session",
        {"session_id": "{session}", "sampling_session_seq_id": 0, "base_model": NUL},
    ),
    "no number": ("create_session", b'{"user_metadata": {"x": NaN}}'),
    "half a character": ("create_session", b'{"display_name": "\\ud800"}'),
    "half a character deep inside": ("create_session", b'{"user_metadata": {"x": "\\ud800"}}'),
    "a number of a thousand digits": ("create_session", b'{"user_metadata": {"x": ' + b"9" * 1000 + b"}}"),
    "a very long number": ("create_session", b'{"user_metadata": {"x": ' + b"9" * 5000 + b"}}"),
    "deep in a session": ("create_session", {"user_metadata": {"x": nested(900)}}),
    "very deep": ("create_session", b'{"user_metadata": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_body_is_no_error_of_the_server(each_api: Api, case: str) -> None:
    path, body = HOSTILE[case]
    names = {"{session}": each_api.session(), "{run}": each_api.run()}
    for name, value in names.items():
        path = path.replace(name, value)
        if isinstance(body, dict):
            body = {key: value if item == name else item for key, item in body.items()}
    answer = each_api.post(path, body)
    assert answer.status_code < 500, answer.text
    assert answer.status_code != 408


@pytest.mark.parametrize(("left_s", "queue"), [(60.0, "wake.w1"), (-1.0, "train.tiny")])
def test_the_bell_of_a_run_rings_at_the_worker_whose_lease_lasts(
    each_api: Api, batch: Batch, redis_url: str, left_s: float, queue: str
) -> None:
    """A dead worker is left in the runs that it held until they have work again."""
    model_id = each_api.run()
    with redis.Redis.from_url(redis_url) as broker:
        wait_for(lambda: broker.delete("train.tiny"))  # the bell of the creation
        with each_api.database.write() as session:
            held = {"worker_id": "w1", "lease_expires_at": database_clock() + left_s}
            session.execute(update(Run).where(Run.id == model_id).values(**held))
        assert each_api.forward_backward(batch(model_id, 1)).status_code == 200
        wait_for(lambda: broker.exists("wake.w1", "train.tiny"))
        assert broker.exists(queue)
