"""Custom losses over HTTP: uploaded once, owned, refused by name, and carried by every operation that uses them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as sdk

from app.custom_losses.models import CustomLoss
from app.custom_losses.service import find
from app.runs.pinning import GRAPH_KEY
from app.wire import tinker_pb2 as pb
from tests.integration.conftest import Api
from tests.unit.app.custom_losses.test_uploads_are_checked import ESCAPES, INPUTS, graph

Batch = Callable[..., bytes]


def upload(session_id: str, number: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "session_id": session_id,
        "custom_loss_seq_id": number,
        "name": "mine",
        "inputs": INPUTS,
        "graph": graph(),
        "type": "create_custom_loss",
    } | fields


def loss_id(api: Api, session_id: str, number: int = 0, **fields: Any) -> str:
    future = api.ok("create_custom_loss", upload(session_id, number, **fields))
    answer = api.poll(future["request_id"])
    assert answer.status_code == 200
    return str(answer.json()["loss_id"])


def session_of(model_id: str) -> str:
    return model_id.partition(":train:")[0]


def custom(batch: Batch, model_id: str, seq_id: int, identity: str | None, **inputs: Any) -> bytes:
    request = sdk.ForwardBackwardRequest.FromString(batch(model_id, seq_id))
    request.loss_fn = "custom"
    if identity is not None:
        request.loss_fn_config_v2["loss_id"].text = identity
    for name, values in ({"w": [1.0, 2.0, 3.0]} | inputs).items():
        tensor = request.data[0].loss_fn_inputs[name]
        tensor.dense, tensor.dtype = np.float32(values).tobytes(), sdk.DTYPE_FLOAT32
    return bytes(request.SerializeToString())


def failure(api: Api, request_id: str) -> str:
    answer = api.poll(request_id)
    assert (answer.status_code, answer.json()["category"]) == (200, "user")
    return str(answer.json()["error"])


def test_clients_are_told_to_upload(api: Api) -> None:
    assert api.ok("client/config", {"sdk_version": "0.38.0"})["custom_loss_server_side"] is True


def test_a_repeated_upload_is_the_same_future_and_the_same_loss(each_api: Api) -> None:
    session_id = each_api.session()
    first = loss_id(each_api, session_id)
    assert loss_id(each_api, session_id) == first
    assert loss_id(each_api, session_id, 1) != first


def test_uploads_at_once_are_one_loss(each_api: Api) -> None:
    session_id = each_api.session()
    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(lambda _: loss_id(each_api, session_id), range(6)))) == 1


def test_another_loss_with_the_same_number_is_a_conflict(api: Api) -> None:
    session_id = api.session()
    loss_id(api, session_id)
    assert api.post("create_custom_loss", upload(session_id, name="other")).status_code == 409


def test_a_graph_that_is_not_allowed_is_a_failed_future_that_names_the_node(each_api: Api) -> None:
    session_id = each_api.session()
    future = each_api.ok("create_custom_loss", upload(session_id, graph=graph(ESCAPES["os.system"])))
    assert failure(each_api, future["request_id"]) == (
        "graph.nodes[2] ('bad').target: function 'os.system' is not allowed in a custom loss"
    )
    with each_api.database.read() as session:
        assert session.query(CustomLoss).one().graph is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"colour": 1}, "colour: unknown field"), ({"graph": []}, "graph:"), ({"name": ""}, "name:")],
)
def test_a_wrong_field_is_a_failed_future_that_names_it(api: Api, fields: dict[str, Any], words: str) -> None:
    future = api.ok("create_custom_loss", upload(api.session(), **fields))
    assert words in failure(api, future["request_id"])


def test_a_body_beyond_any_graph_is_too_large(api: Api) -> None:
    answer = api.post("create_custom_loss", upload(api.session(), name="x" * 2**22))
    assert answer.status_code == 413 and "graph" in answer.json()["detail"]


def test_an_upload_that_nests_without_end_is_no_error_of_the_server(api: Api) -> None:
    body = b'{"session_id":"s","custom_loss_seq_id":0,"graph":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001
    assert api.post("create_custom_loss", body).status_code == 400


def test_a_loss_and_its_future_are_their_owners(api: Api, batch: Batch) -> None:
    session_id = api.session()
    identity = loss_id(api, session_id)
    assert api.poll(f"{session_id}:custom_loss:0", who="bob").status_code == 404
    assert api.poll(f"{session_id}:custom_loss:1").status_code == 404
    assert api.post("create_custom_loss", upload(session_id, 5), who="bob").status_code == 404
    model_id = api.run("bob")
    future = api.forward_backward(custom(batch, model_id, 1, identity), who="bob").json()
    answer = api.poll(future["request_id"], who="bob").json()
    assert answer == {"category": "user", "error": f"loss_fn_config['loss_id']: there is no custom loss '{identity}'"}


def test_a_finished_session_takes_no_more_losses(api: Api) -> None:
    session_id = api.session()
    api.ok(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
    assert api.post("create_custom_loss", upload(session_id)).status_code == 410


def test_an_operation_carries_the_graph_that_it_names(each_api: Api, batch: Batch) -> None:
    model_id = each_api.run()
    identity = loss_id(each_api, session_of(model_id))
    body = custom(batch, model_id, 1, identity, unread=[9.0])
    assert each_api.forward_backward(body).status_code == 200
    assert each_api.forward_backward(body).status_code == 200, "a repeat is known by what the client sent"
    stored = pb.ForwardBackwardRequest.FromString(each_api.operation(model_id, 1).body or b"")
    with each_api.database.read() as session:
        owner_id = session.query(CustomLoss).one().owner_id
        assert stored.loss_fn_config_v2[GRAPH_KEY].text == find(session, owner_id, identity).text
    assert each_api.operation(model_id, 1).state == "accepted"


@pytest.mark.parametrize(
    ("identity", "inputs", "words"),
    [
        (None, {}, "loss_fn_config['loss_id']: missing"),
        ("nowhere", {}, "loss_fn_config['loss_id']: there is no custom loss 'nowhere'"),
        ("no\0where", {}, "loss_fn_config['loss_id']: there is no custom loss 'no\\x00where'"),
        ("own", {"w": [1.0]}, "data[0].loss_fn_inputs['w']: has shape [1], expected [3]"),
    ],
)
def test_a_batch_that_the_loss_cannot_take_fails_in_its_place(
    each_api: Api, batch: Batch, identity: str | None, inputs: dict[str, Any], words: str
) -> None:
    model_id = each_api.run()
    own = loss_id(each_api, session_of(model_id))
    body = custom(batch, model_id, 1, own if identity == "own" else identity, **inputs)
    future = each_api.forward_backward(body).json()
    assert words in failure(each_api, future["request_id"])


def test_nobody_can_send_a_graph_with_a_batch(api: Api, batch: Batch) -> None:
    model_id = api.run()
    request = sdk.ForwardBackwardRequest.FromString(custom(batch, model_id, 1, loss_id(api, session_of(model_id))))
    request.loss_fn_config_v2[GRAPH_KEY].text = "{}"
    future = api.forward_backward(request.SerializeToString()).json()
    assert "loss_fn_config['graph']: unknown to custom" in failure(api, future["request_id"])
