"""A published checkpoint: everybody can read it, and only its owner can change it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from app.checkpoints import service as checkpoints
from app.runs.models import Run
from tests.factories import add_checkpoint
from tests.integration.conftest import Api


@pytest.fixture
def path(each_api: Api) -> str:
    """A private checkpoint of bob's."""
    model_id = each_api.run("bob")
    with each_api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, model_id), user_metadata={"note": "mine"})
    return f"tinker://{model_id}/weights/first"


def publish(api: Api, path: str, method: str = "POST", who: str = "bob") -> int:
    model_id, _, checkpoint_id = path.removeprefix("tinker://").partition("/")
    where = f"training_runs/{model_id}/checkpoints/{checkpoint_id}/publish"
    return api.send(method, where, who=who).status_code


def load(api: Api, path: str) -> dict[str, Any]:
    """Alice's run of the checkpoint: its operation 0."""
    session_id = api.session()
    body = {"session_id": session_id, "model_seq_id": 0, "path": path, "optimizer": True}
    future = api.ok("load_weights", body)
    operation = api.operation(future["model_id"], 0)
    return {"state": operation.state, "error": operation.error, "body": orjson.loads(operation.body or b"{}")}


def sampler(api: Api, path: str) -> int:
    body = {"session_id": api.session(), "sampling_session_seq_id": 0, "model_path": path}
    return api.post("create_sampling_session", body).status_code


def info(api: Api, path: str, who: str = "alice") -> int:
    return api.post("weights_info", {"tinker_path": path}, who=who).status_code


def test_a_private_one_can_be_read_by_its_owner_only(each_api: Api, path: str) -> None:
    assert (info(each_api, path), info(each_api, path, "bob")) == (404, 200)
    assert sampler(each_api, path) == 404
    assert load(each_api, path)["state"] == "failed"


def test_a_published_one_can_be_loaded_sampled_and_described(each_api: Api, path: str) -> None:
    assert publish(each_api, path) == 204
    assert info(each_api, path) == 200
    assert sampler(each_api, path) == 200
    loaded = load(each_api, path)
    assert loaded["state"] == "accepted", loaded["error"]
    with each_api.database.read() as session:
        found = checkpoints.resolve(session, "nobody", path, field="path")
    assert loaded["body"]["snapshot_id"] == found.snapshot.id


def test_an_unpublished_one_is_private_again(each_api: Api, path: str) -> None:
    publish(each_api, path)
    assert publish(each_api, path, "DELETE") == 204
    assert (info(each_api, path), sampler(each_api, path)) == (404, 404)


def test_publishing_and_unpublishing_twice_is_no_error(each_api: Api, path: str) -> None:
    assert [publish(each_api, path, method) for method in ("POST", "POST", "DELETE", "DELETE")] == [204] * 4


def test_only_its_owner_can_publish_one(each_api: Api, path: str) -> None:
    assert publish(each_api, path, who="alice") == 404
    assert info(each_api, path) == 404


def test_new_weights_under_a_published_name_are_private(each_api: Api, path: str) -> None:
    publish(each_api, path)
    model_id = path.split("/")[2]
    with each_api.database.write() as session:
        run = session.get_one(Run, model_id)
        snapshot_id = add_checkpoint(session, run, "second").snapshot_id
        checkpoints.name_snapshot(
            session,
            owner_id=run.owner_id,
            model_id=model_id,
            kind="weights",
            name="first",
            snapshot_id=snapshot_id,
            ttl_seconds=None,
            user_metadata=None,
        )
    assert info(each_api, path) == 404


def test_weights_info_is_enough_to_make_a_run_that_it_fits_into(each_api: Api, path: str) -> None:
    assert each_api.ok("weights_info", {"tinker_path": path}, who="bob") == {
        "base_model": "tiny",
        "is_lora": True,
        "lora_rank": 4,
        "train_unembed": True,
        "train_mlp": True,
        "train_attn": True,
        "optimizer_config": {"type": "adamw"},
    }


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        ({"tinker_path": "weights/first"}, 400, "tinker_path"),
        ({"tinker_path": "tinker://r/weights/a", "more": 1}, 422, "more: unknown field"),
        ({}, 422, "tinker_path"),
    ],
)
def test_a_wrong_question_is_refused_by_name(api: Api, body: object, status: int, field: str) -> None:
    answer = api.post("weights_info", body)
    assert answer.status_code == status
    assert answer.json()["detail"].startswith(field)
