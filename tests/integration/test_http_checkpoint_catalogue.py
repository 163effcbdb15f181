"""Checkpoints over HTTP: listed, given a life, deleted; for their owner, and nobody else."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from sqlalchemy import select

from app.audit.models import AuditEntry
from app.checkpoints import service as checkpoints
from app.checkpoints.models import Snapshot
from app.db import utc_now
from app.runs.models import Run
from tests.factories import add_checkpoint
from tests.integration.conftest import Api

HOUR = timedelta(hours=1)


def save(api: Api, model_id: str, *names: str, **columns: object) -> None:
    """Named checkpoints of a run, each made after the one before."""
    with api.database.write() as session:
        run = session.get_one(Run, model_id)
        for name in names:
            add_checkpoint(session, run, name, **columns)  # type: ignore[arg-type]


def names(answer: dict[str, list[dict[str, str]]]) -> list[str]:
    return [checkpoint["checkpoint_id"] for checkpoint in answer["checkpoints"]]


def listed(api: Api, model_id: str) -> list[str]:
    return names(api.seen(f"training_runs/{model_id}/checkpoints"))


def test_a_runs_checkpoints_are_listed_newest_first(each_api: Api) -> None:
    model_id = each_api.run()
    save(each_api, model_id, "one", "two", user_metadata={"step": "7"}, size_bytes=5)
    save(each_api, model_id, "one", kind="sampler_weights", expires_at=utc_now() + HOUR)
    answer = each_api.seen(f"training_runs/{model_id}/checkpoints")
    assert names(answer) == ["sampler_weights/one", "weights/two", "weights/one"]
    assert answer["cursor"] is None
    sampler, training = answer["checkpoints"][:2]
    assert datetime.fromisoformat(sampler["expires_at"]) > utc_now()
    assert (sampler["checkpoint_type"], training["checkpoint_type"]) == ("sampler", "training")
    assert datetime.fromisoformat(training["time"]).tzinfo is not None
    assert training["tinker_path"] == f"tinker://{model_id}/weights/two"
    assert (training["size_bytes"], training["public"]) == (5, False)
    assert (training["user_metadata"], training["expires_at"]) == ({"step": "7"}, None)


def test_all_checkpoints_of_an_owner_come_in_pages(each_api: Api) -> None:
    runs = [each_api.run(), each_api.run()]
    for number in range(5):
        save(each_api, runs[number % 2], str(number))
    save(each_api, each_api.run("bob"), "theirs")
    pages = [each_api.seen(f"checkpoints?limit=2&offset={offset}") for offset in (0, 2, 4, 6)]
    assert [names(page) for page in pages] == [
        ["weights/4", "weights/3"],
        ["weights/2", "weights/1"],
        ["weights/0"],
        [],
    ]
    assert pages[1]["cursor"] == {"offset": 2, "limit": 2, "total_count": 5}
    assert names(each_api.seen("checkpoints", who="bob")) == ["weights/theirs"]


def test_what_has_expired_is_not_there(each_api: Api) -> None:
    model_id = each_api.run()
    save(each_api, model_id, "old", expires_at=utc_now() - HOUR)
    save(each_api, model_id, "young", expires_at=utc_now() + HOUR)
    assert listed(each_api, model_id) == ["weights/young"]
    assert each_api.seen("checkpoints")["cursor"]["total_count"] == 1
    old = f"training_runs/{model_id}/checkpoints/weights/old"
    answers = [
        each_api.send("DELETE", old),
        each_api.send("POST", f"{old}/publish"),
        each_api.send("DELETE", f"{old}/publish"),
        each_api.send("PUT", f"{old}/ttl", {"ttl_seconds": None}),
        each_api.post("weights_info", {"tinker_path": f"tinker://{model_id}/weights/old"}),
    ]
    assert [answer.status_code for answer in answers] == [404] * 5


def test_the_name_of_an_expired_checkpoint_is_free_again(each_api: Api) -> None:
    model_id = each_api.run()
    save(each_api, model_id, "old", expires_at=utc_now() - HOUR)
    save(each_api, model_id, "young")
    with each_api.database.read() as session:
        assert not checkpoints.exists(session, model_id, "weights", "old")
        assert checkpoints.exists(session, model_id, "weights", "young")


def test_a_life_is_set_and_taken_away(each_api: Api) -> None:
    model_id = each_api.run()
    save(each_api, model_id, "one")
    path = f"training_runs/{model_id}/checkpoints"
    assert each_api.send("PUT", f"{path}/weights/one/ttl", {"ttl_seconds": 7200}).status_code == 204
    expires_at = datetime.fromisoformat(each_api.seen(path)["checkpoints"][0]["expires_at"])
    assert expires_at - utc_now() == pytest.approx(2 * HOUR, abs=timedelta(seconds=10))
    assert each_api.send("PUT", f"{path}/weights/one/ttl", {"ttl_seconds": None}).status_code == 204
    assert each_api.seen(path)["checkpoints"][0]["expires_at"] is None


@pytest.mark.parametrize(
    "body", [{}, {"ttl_seconds": 3599}, {"ttl_seconds": 11 * 366 * 86400}, {"ttl_seconds": "soon"}]
)
def test_a_life_out_of_range_is_refused_by_name(api: Api, body: object) -> None:
    answer = api.send("PUT", "training_runs/r/checkpoints/weights/one/ttl", body)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("ttl_seconds:")


def test_a_deleted_checkpoint_is_gone_and_its_snapshot_stays_for_who_holds_it(each_api: Api) -> None:
    model_id = each_api.run()
    save(each_api, model_id, "one", "two")
    body = {"session_id": each_api.session(), "sampling_session_seq_id": 0}
    path = f"tinker://{model_id}/weights/one"
    sampler = each_api.ok("create_sampling_session", body | {"model_path": path})["sampling_session_id"]
    where = f"training_runs/{model_id}/checkpoints/weights/one"
    assert [each_api.send("DELETE", where).status_code for _ in range(2)] == [204, 404]
    assert listed(each_api, model_id) == ["weights/two"]
    assert (
        each_api.post("create_sampling_session", body | {"model_path": path}).json()["sampling_session_id"] == sampler
    )
    fresh = body | {"sampling_session_seq_id": 1, "model_path": path}
    assert each_api.post("create_sampling_session", fresh).status_code == 404
    sample = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_session_id": sampler, "seq_id": 0}
    assert each_api.post("asample", sample).status_code == 200
    with each_api.database.read() as session:
        assert len(session.scalars(select(Snapshot.id)).all()) == 2


@pytest.mark.parametrize("name", ["publish", "ttl"])
def test_a_checkpoint_may_be_called_like_a_suffix(api: Api, name: str) -> None:
    model_id = api.run()
    save(api, model_id, name, public=True)
    path = f"training_runs/{model_id}/checkpoints/weights/{name}"
    assert api.send("DELETE", f"{path}/publish").status_code == 204
    assert api.send("DELETE", path).status_code == 204
    assert listed(api, model_id) == []


def test_somebody_elses_checkpoint_cannot_be_seen_or_changed(each_api: Api) -> None:
    model_id = each_api.run("bob")
    save(each_api, model_id, "open", public=True)
    save(each_api, model_id, "closed")
    path = f"training_runs/{model_id}/checkpoints"
    for name in ("open", "closed"):
        answers = [
            each_api.send("DELETE", f"{path}/weights/{name}"),
            each_api.send("POST", f"{path}/weights/{name}/publish"),
            each_api.send("DELETE", f"{path}/weights/{name}/publish"),
            each_api.send("PUT", f"{path}/weights/{name}/ttl", {"ttl_seconds": 3600}),
            each_api.send("GET", path),
        ]
        assert [answer.status_code for answer in answers] == [404] * 5
    theirs = each_api.seen(path, who="bob")["checkpoints"]
    assert {(row["checkpoint_id"], row["public"], row["expires_at"]) for row in theirs} == {
        ("weights/open", True, None),
        ("weights/closed", False, None),
    }


def test_a_kind_that_there_is_not_is_refused_by_name(api: Api) -> None:
    answer = api.send("DELETE", f"training_runs/{api.run()}/checkpoints/other/one")
    assert answer.status_code == 400
    assert "'other' is no kind" in answer.json()["detail"]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "offset=-1", "limit=x", "sort=name"])
def test_a_wrong_query_is_refused_by_name(api: Api, query: str) -> None:
    for path in ("checkpoints", "training_runs", "sessions"):
        answer = api.send("GET", f"{path}?{query}")
        assert answer.status_code == 422
        assert query.partition("=")[0] in answer.json()["detail"]


def test_what_is_done_to_a_checkpoint_is_in_the_audit_log(api: Api) -> None:
    model_id = api.run()
    save(api, model_id, "one")
    path = f"training_runs/{model_id}/checkpoints/weights/one"
    api.send("POST", f"{path}/publish")
    api.send("DELETE", f"{path}/publish")
    api.send("PUT", f"{path}/ttl", {"ttl_seconds": 3600})
    api.send("DELETE", path)
    api.send("DELETE", path)
    with api.database.read() as session:
        query = select(AuditEntry.event).where(AuditEntry.resource == "checkpoints").order_by(AuditEntry.id)
        events = session.scalars(query).all()
    assert events == ["checkpoint_publish", "checkpoint_unpublish", "checkpoint_set_ttl", "checkpoint_delete"]
