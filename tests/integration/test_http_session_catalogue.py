"""Sessions over HTTP: listed, looked at, searched, moved into projects."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import update

from app.db import utc_now
from app.runs.models import Run
from app.sessions import search as searching
from app.sessions.models import ClientSession
from app.wire import perfetto_pb2
from tests.factories import add_checkpoint
from tests.integration.conftest import Api


def begin(api: Api, who: str = "alice", **fields: object) -> str:
    return str(api.ok("create_session", fields, who=who)["session_id"])


def search(api: Api, who: str = "alice", **fields: object) -> dict[str, Any]:
    return api.ok("sessions/search", fields, who=who)


def found(api: Api, who: str = "alice", **fields: object) -> list[str]:
    return [summary["session_id"] for summary in search(api, who, **fields)["sessions"]]


def test_sessions_come_newest_first_and_in_pages(each_api: Api) -> None:
    sessions = [begin(each_api) for _ in range(5)]
    theirs = begin(each_api, "bob")
    pages = [each_api.seen(f"sessions?limit=2&offset={offset}")["sessions"] for offset in (0, 2, 4, 6)]
    assert pages == [sessions[:2:-1], sessions[2:0:-1], sessions[:1], []]
    assert each_api.seen("sessions?access_scope=accessible", who="bob") == {"sessions": [theirs]}


def test_a_session_tells_what_it_has_made(each_api: Api) -> None:
    session_id = begin(each_api, user_metadata={"a": "b", "n": 1}, display_name="Nightly", tags=["x"])
    runs = [each_api.create(session_id, number)["model_id"] for number in range(2)]
    body = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = each_api.ok("create_sampling_session", body)["sampling_session_id"]
    assert each_api.seen(f"sessions/{session_id}") == {
        "training_run_ids": runs,
        "sampler_ids": [sampler],
        "user_metadata": {"a": "b", "n": "1"},
        "display_name": "Nightly",
        "tags": ["x"],
    }


def test_somebody_elses_session_is_not_there(each_api: Api) -> None:
    theirs = begin(each_api, "bob")
    for session_id in (theirs, "never-was"):
        assert each_api.send("GET", f"sessions/{session_id}?access_scope=accessible").status_code == 404
        assert each_api.send("PUT", f"sessions/{session_id}/project", {"project_id": "p"}).status_code == 404
        assert each_api.send("GET", f"sessions/{session_id}/trace_export").status_code == 404
    for owner in ({"type": "own"}, {"type": "accessible"}, {"type": "user", "owner_urns": ["bob"]}):
        assert found(each_api, owner=owner) == []
    assert found(each_api, session_id=theirs) == []


def test_a_session_is_moved_into_a_project(each_api: Api) -> None:
    session_id = begin(each_api, project_id="old")
    path = f"sessions/{session_id}/project"
    assert each_api.send("PUT", path, {"project_id": "new"}).status_code == 204
    assert search(each_api)["sessions"][0]["project_id"] == "new"


@pytest.mark.parametrize("body", [{}, {"project_id": None}, {"project_id": ""}])
def test_a_session_cannot_be_moved_out_of_projects(api: Api, body: object) -> None:
    answer = api.send("PUT", f"sessions/{begin(api)}/project", body)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith("project_id:")


def test_a_trace_needs_its_own_link_and_no_key(each_api: Api) -> None:
    session_id = begin(each_api)
    run = each_api.create(session_id, 0)["model_id"]
    assert each_api.send("GET", f"sessions/{session_id}/trace_export", who="bob").status_code == 404
    exported = each_api.seen(f"sessions/{session_id}/trace_export")
    assert exported["status"] == "ready"
    path = exported["url"].removeprefix("http://testserver")
    packets = perfetto_pb2.Trace.FromString(each_api.client.get(path).content).packet
    assert packets[0].track_descriptor.name == run
    assert "create_model" in [packet.track_event.name for packet in packets]
    forged = path.replace("/traces/", "/traces/x")
    assert each_api.client.get(forged).status_code == 403


def test_a_search_goes_through_its_pages(each_api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "_BATCH", 3)
    sessions = [begin(each_api, display_name="even" if number % 2 == 0 else "odd") for number in range(9)]
    with each_api.database.write() as session:  # as if several had begun in one moment
        session.execute(update(ClientSession).where(ClientSession.id.in_(sessions[2:7])).values(created_at=utc_now()))
    for name, expected in ((None, set(sessions)), ("even", set(sessions[::2]))):
        seen: list[str] = []
        body: dict[str, object] = {"limit": 2} | ({"display_name": name} if name else {})
        while True:
            page = each_api.ok("sessions/search", body)
            assert 0 < len(page["sessions"]) <= 2
            seen += [summary["session_id"] for summary in page["sessions"]]
            if "next_cursor" not in page:
                break
            body["cursor"] = page["next_cursor"]
        assert (len(seen), set(seen)) == (len(expected), expected)


def test_a_summary_tells_what_the_sdk_reads(each_api: Api) -> None:
    session_id = begin(each_api, user_metadata={"a": 1}, display_name="Nightly", project_id="p")
    model_id = each_api.create(session_id)["model_id"]
    with each_api.database.write() as session:
        run = session.get_one(Run, model_id)
        first = add_checkpoint(session, run, "one", size_bytes=100)
        add_checkpoint(session, run, "two", size_bytes=10)
        add_checkpoint(session, run, "old", size_bytes=1, expires_at=utc_now())
        add_checkpoint(session, run, "same", snapshot_id=first.snapshot_id)
    (summary,) = search(each_api)["sessions"]
    assert summary.pop("owner").endswith(run.owner_id)
    assert summary.pop("created_at")
    assert summary == {
        "session_id": session_id,
        "project_id": "p",
        "status": {"type": "active"},
        "checkpoints_count": 3,
        "checkpoint_storage_bytes": 110,
        "display_name": "Nightly",
        "user_metadata": {"a": "1"},
    }


def test_sessions_are_found_by_their_owners_urn(each_api: Api) -> None:
    session_id = begin(each_api)
    owner = search(each_api)["sessions"][0]["owner"]
    assert found(each_api, owner={"type": "user", "owner_urns": ["other", owner]}) == [session_id]
    assert found(each_api, "bob", owner={"type": "user", "owner_urns": [owner]}) == []


def test_sessions_are_found_by_name_id_project_and_metadata(each_api: Api) -> None:
    first = begin(each_api, display_name="Nightly MÜLLER run", user_metadata={"k": "v", 'q"': "1", "n": 2})
    second = begin(each_api, project_id="p")
    assert found(each_api, display_name="müller NIGHT") == [first]
    assert found(each_api, display_name="müller day") == []
    assert found(each_api, session_id=second) == [second]
    assert found(each_api, session_id=second, display_name="nightly") == [second, first]
    assert found(each_api, project_ids=["p", "q"]) == [second]
    assert found(each_api, project_ids=[""]) == [first]
    assert found(each_api, project_ids=[]) == []
    assert found(each_api, user_metadata={"k": "v", 'q"': "1", "n": "2"}) == [first]
    assert found(each_api, user_metadata={"k": "v", "x": "y"}) == []


def test_sessions_are_found_by_status(each_api: Api) -> None:
    active, silent, done, broken = (begin(each_api) for _ in range(4))
    for session_id, reason in ((done, "success"), (broken, "errored")):
        each_api.ok(f"sessions/{session_id}/finish", {"reason": {"type": reason}, "detail": "why"})
    with each_api.database.write() as session:
        session.get_one(ClientSession, silent).silent_since = utc_now()
    finished = {"type": "client_finished"}
    assert found(each_api, statuses=[{"type": "active"}]) == [active]
    assert found(each_api, statuses=[finished]) == [broken, done]
    assert found(each_api, statuses=[finished | {"reasons": ["errored", "interrupted"]}]) == [broken]
    assert found(each_api, statuses=[{"type": "failed"}, {"type": "cancelled"}]) == []
    assert found(each_api, statuses=[{"type": "active"}, finished]) == [broken, done, active]
    statuses = [summary.get("status") for summary in search(each_api)["sessions"]]
    assert statuses[0] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "why"}
    assert statuses[2:] == [None, {"type": "active"}]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
        ({"tags": ["a"]}, "tags: unknown field"),
        ({"owner": {"type": "team"}}, "owner"),
        ({"owner": {"type": "user", "owner_urns": []}}, "owner.user.owner_urns"),
        ({"statuses": []}, "statuses"),
        ({"statuses": [{"type": "active", "reasons": ["success"]}]}, "statuses.0"),
        ({"display_name": ""}, "display_name"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "x"}}, "cursor.last_created_at"),
        ({"user_metadata": {"k": 1}}, "user_metadata.k"),
    ],
)
def test_a_wrong_field_is_refused_by_name(api: Api, fields: dict[str, object], field: str) -> None:
    answer = api.post("sessions/search", fields)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(field)
