"""Copies of checkpoints: of one's own or a published one, made once however often they are asked for."""

from __future__ import annotations

import uuid

import httpx
import pytest
from sqlalchemy import func, select

from app.checkpoints.models import Checkpoint, Snapshot
from app.runs.models import Run
from app.sessions.models import ClientSession
from tests.factories import add_checkpoint
from tests.integration.conftest import Api


def make(api: Api, who: str = "alice", **columns: object) -> str:
    """A checkpoint of a run of `who`; returns its path."""
    model_id = api.run(who)
    with api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, model_id), user_metadata={"step": "7"}, **columns)  # type: ignore[arg-type]
    return f"tinker://{model_id}/{columns.get('kind', 'weights')}/first"


def copy(api: Api, path: str, key: str | None = None, *, who: str = "alice", **fields: object) -> httpx.Response:
    body = {"source_path": path} | (fields or {"destination_project_id": "archive"})
    headers = {"x_idempotency_key": key} if key else {}
    return api.post("copy_weights", body, who=who, **headers)


def copied(api: Api, path: str, **fields: object) -> str:
    answer = copy(api, path, **fields)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["tinker_path"])


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_a_copy_is_a_new_name_for_the_same_snapshot(each_api: Api, kind: str) -> None:
    path = copied(each_api, make(each_api, kind=kind))
    _, _, model_id, copied_kind, name = path.split("/")
    assert (copied_kind, name) == (kind, "first")
    row = each_api.seen(f"training_runs/{model_id}/checkpoints")["checkpoints"][0]
    assert (row["tinker_path"], row["user_metadata"], row["expires_at"]) == (path, {"step": "7"}, None)
    with each_api.database.read() as session:
        assert session.scalar(select(func.count(Snapshot.id))) == 1
    assert each_api.post("weights_info", {"tinker_path": path}).json()["lora_rank"] == 4


def test_a_copy_belongs_to_the_project_and_outlives_its_source(each_api: Api) -> None:
    source = make(each_api)
    path = copied(each_api, source, destination_project_id="archive", ttl_seconds=3600)
    model_id, where = path.split("/")[2], source.removeprefix("tinker://").replace("/weights/", "/checkpoints/weights/")
    assert each_api.send("DELETE", f"training_runs/{where}").status_code == 204
    runs = each_api.seen("training_runs?project_id=archive")["training_runs"]
    assert [run["training_run_id"] for run in runs] == [model_id]
    assert runs[0]["last_checkpoint"]["expires_at"] is not None
    body = {"session_id": each_api.session(), "sampling_session_seq_id": 0, "model_path": path}
    assert each_api.post("create_sampling_session", body).status_code == 200


def test_a_copy_into_a_session_is_its_run_of_that_number(each_api: Api) -> None:
    session_id, source = each_api.session(), make(each_api)
    place = {"session_id": session_id, "model_seq_id": 3}
    assert [copied(each_api, source, **place) for _ in range(2)] == [f"tinker://{session_id}:train:3/weights/first"] * 2
    other = copy(each_api, make(each_api), **place)
    assert other.status_code == 409
    body = {"base_model": "tiny", "lora_config": {"rank": 4}}
    assert each_api.post("create_model", place | body).status_code == 409


def test_a_copy_is_never_trained(each_api: Api) -> None:
    session_id = each_api.session()
    path = copied(each_api, make(each_api), session_id=session_id, model_seq_id=0)
    model_id = path.split("/")[2]
    each_api.ok("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    operation = each_api.operation(model_id, 1)
    assert operation.state == "failed"
    assert "copy of a checkpoint" in (operation.error or "")
    assert each_api.ok("get_info", {"model_id": model_id})["lora_rank"] == 4


def test_a_retried_copy_is_made_once(each_api: Api) -> None:
    source, key = make(each_api), str(uuid.uuid4())
    paths = {copy(each_api, source, key).json()["tinker_path"] for _ in range(3)}
    assert len(paths) == 1
    with each_api.database.read() as session:
        assert session.scalar(select(func.count(Checkpoint.id))) == 2
    assert copy(each_api, source, key, destination_project_id="elsewhere").status_code == 409
    assert copy(each_api, source, str(uuid.uuid4())).json()["tinker_path"] not in paths


def test_a_private_checkpoint_cannot_be_copied_by_others_and_a_published_one_can(each_api: Api) -> None:
    assert copy(each_api, make(each_api, "bob")).status_code == 404
    path = copied(each_api, make(each_api, "bob", public=True))
    model_id = path.split("/")[2]
    run = each_api.seen(f"training_runs/{model_id}")
    assert (run["model_owner"], run["last_checkpoint"]["public"]) == ("alice", False)
    assert each_api.send("GET", f"training_runs/{model_id}", who="bob").status_code == 404
    assert each_api.send("DELETE", f"training_runs/{model_id}/checkpoints/weights/first").status_code == 204


def test_a_copy_into_a_finished_session_or_somebody_elses_is_refused(each_api: Api) -> None:
    source = make(each_api)
    assert copy(each_api, source, session_id=each_api.session("bob"), model_seq_id=0).status_code == 404
    session_id = each_api.session()
    each_api.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
    assert copy(each_api, source, session_id=session_id, model_seq_id=0).status_code == 410


def test_a_refused_copy_leaves_nothing_behind(each_api: Api) -> None:
    assert copy(each_api, "tinker://never/weights/was").status_code == 404
    with each_api.database.read() as session:
        assert session.scalar(select(func.count(ClientSession.id))) == 0


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"session_id": "s"}, "session_id and model_seq_id"),
        ({"destination_project_id": "p", "session_id": "s", "model_seq_id": 0}, "exactly one of"),
        ({"ttl_seconds": 3600}, "exactly one of"),
        ({"destination_project_id": "p", "ttl_seconds": 1}, "ttl_seconds"),
        ({"destination_project_id": "p", "weights_access_token": "tok"}, "weights_access_token"),
        ({"destination_project_id": "p", "name": "n"}, "name: unknown field"),
    ],
)
def test_a_wrong_field_is_refused_by_name(api: Api, fields: dict[str, object], field: str) -> None:
    answer = copy(api, "tinker://r/weights/a", **fields)
    assert answer.status_code == 422
    assert field in answer.json()["detail"]
