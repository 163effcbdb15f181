"""Runs over HTTP: listed in pages, with what the SDK reads of them."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from sqlalchemy import update

from app.db import utc_now
from app.runs.models import Run
from app.sessions.models import ClientSession
from tests.factories import add_checkpoint
from tests.integration.conftest import Api


def ids(answer: dict[str, list[dict[str, str]]]) -> list[str]:
    return [run["training_run_id"] for run in answer["training_runs"]]


def checkpoint(api: Api, model_id: str, name: str, **columns: object) -> None:
    with api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, model_id), name, **columns)  # type: ignore[arg-type]


def test_runs_come_newest_first_and_in_pages(each_api: Api) -> None:
    runs = [each_api.run() for _ in range(5)]
    each_api.run("bob")
    pages = [each_api.seen(f"training_runs?limit=2&offset={offset}") for offset in (0, 2, 4, 6)]
    assert [ids(page) for page in pages] == [runs[:2:-1], runs[2:0:-1], runs[:1], []]
    assert pages[2]["cursor"] == {"offset": 4, "limit": 2, "total_count": 5}


def test_a_run_is_told_as_the_sdk_reads_it(each_api: Api) -> None:
    session_id = each_api.session()
    metadata = {"renderer_name": "tiny", "epochs": 3, "tags": ["a"], "none": None}
    model_id = each_api.create(session_id, user_metadata=metadata)["model_id"]
    run = each_api.seen(f"training_runs/{model_id}")
    assert run["user_metadata"] == {"renderer_name": "tiny", "epochs": "3", "tags": '["a"]', "none": "null"}
    assert (run["base_model"], run["model_owner"], run["is_lora"], run["lora_rank"]) == ("tiny", "alice", True, 4)
    assert (run["corrupted"], run["last_checkpoint"], run["last_sampler_checkpoint"]) == (False, None, None)
    assert datetime.fromisoformat(run["last_request_time"]).tzinfo is not None
    assert each_api.seen("training_runs")["training_runs"] == [run]


def test_the_newest_checkpoint_of_each_kind_is_shown(each_api: Api) -> None:
    other, model_id = each_api.run(), each_api.run()
    checkpoint(each_api, other, "other")
    for name in ("one", "two"):
        checkpoint(each_api, model_id, name)
        checkpoint(each_api, model_id, f"sampler-{name}", kind="sampler_weights")
    checkpoint(each_api, model_id, "expired", expires_at=utc_now() - timedelta(seconds=1))
    run = each_api.seen(f"training_runs/{model_id}")
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/two"
    assert run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/sampler-two"
    runs = each_api.seen("training_runs")["training_runs"]
    assert [run["last_checkpoint"]["checkpoint_id"] for run in runs] == ["weights/two", "weights/other"]


def test_runs_of_one_project(each_api: Api) -> None:
    session_id = each_api.ok("create_session", {"project_id": "p"})["session_id"]
    model_id = each_api.create(session_id)["model_id"]
    moved = each_api.run()
    each_api.run()
    assert ids(each_api.seen("training_runs?project_id=p")) == [model_id]
    path = f"sessions/{moved.partition(':')[0]}/project"
    assert each_api.send("PUT", path, {"project_id": "p"}).status_code == 204
    page = each_api.seen("training_runs?project_id=p")
    assert (ids(page), page["cursor"]["total_count"]) == ([moved, model_id], 2)
    assert ids(each_api.seen("training_runs?project_id=q")) == []


def test_a_run_whose_creation_failed_is_corrupted(each_api: Api) -> None:
    model_id = each_api.create(each_api.session(), base_model="nobody-serves-it")["model_id"]
    assert each_api.seen(f"training_runs/{model_id}")["corrupted"] is True


def test_the_time_of_the_last_request_moves(each_api: Api) -> None:
    model_id = each_api.run()
    before = utc_now() - timedelta(minutes=1)
    with each_api.database.write() as session:
        session.execute(update(Run).values(last_request_at=before))
        session.execute(update(ClientSession).values(last_seen_at=utc_now()))  # by a heartbeat
    each_api.ok("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    assert datetime.fromisoformat(each_api.seen(f"training_runs/{model_id}")["last_request_time"]) > before


def test_somebody_elses_run_is_not_there(each_api: Api) -> None:
    model_id = each_api.run("bob")
    checkpoint(each_api, model_id, "private")
    for scope in ("owned", "accessible"):
        assert each_api.send("GET", f"training_runs/{model_id}?access_scope={scope}").status_code == 404
        assert each_api.seen(f"training_runs?access_scope={scope}")["cursor"]["total_count"] == 0


def test_a_run_with_a_published_checkpoint_is_accessible_without_its_secrets(each_api: Api) -> None:
    model_id = each_api.create(each_api.session("bob"), who="bob", user_metadata={"secret": "x"})["model_id"]
    checkpoint(each_api, model_id, "open", public=True)
    checkpoint(each_api, model_id, "closed")
    mine = each_api.run()
    assert each_api.send("GET", f"training_runs/{model_id}").status_code == 404
    run = each_api.seen(f"training_runs/{model_id}?access_scope=accessible")
    assert run["last_checkpoint"]["checkpoint_id"] == "weights/open"
    assert (run["user_metadata"], run["model_owner"]) == (None, "bob")
    assert ids(each_api.seen("training_runs?access_scope=accessible")) == [mine, model_id]
    assert ids(each_api.seen("training_runs")) == [mine]


@pytest.mark.parametrize("path", ["training_runs", "training_runs/x", "sessions", "sessions/x"])
def test_a_scope_that_there_is_not_is_refused_by_name(api: Api, path: str) -> None:
    answer = api.send("GET", f"{path}?access_scope=everything")
    assert answer.status_code == 422
    assert "access_scope" in answer.json()["detail"]
