"""The audit log over HTTP, on both databases: what is noted, and who sees it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import update
from tinker.types import AuditLogResponse

from app.accounts.service import create_key, list_keys, revoke_key
from app.audit import service as audit
from app.audit.models import AuditEntry
from app.db import utc_now
from tests import factories
from tests.integration.conftest import Api


def ask(api: Api, query: str = "", *, who: str = "alice") -> list[dict[str, Any]]:
    answer = api.get(f"/api/v1/audit{query}", who=who)
    assert answer.status_code == 200, answer.text
    AuditLogResponse.model_validate(answer.json())
    found: list[dict[str, Any]] = answer.json()["entries"]
    return found


def events(api: Api, query: str = "", *, who: str = "alice") -> list[str]:
    return [entry["event"] for entry in ask(api, query, who=who)]


def test_keys_made_and_revoked_are_noted(each_api: Api) -> None:
    row, secret = create_key("alice", "laptop")
    revoke_key(row.id)
    revoke_key(row.id)
    assert events(each_api) == ["api_key_create", "api_key_create", "api_key_revoke"]
    assert ask(each_api)[-1]["event_details"] == {"key_id": row.id, "name": "laptop", "prefix": row.prefix}
    assert secret not in str(ask(each_api))


def test_a_key_revoked_by_its_bearer_is_noted(each_api: Api) -> None:
    each_api.keys["laptop"] = create_key("alice", "laptop")[1]
    assert each_api.client.delete("/api/v1/auth/apikey/me", headers={"x-api-key": each_api.keys["laptop"]}).is_success
    assert events(each_api)[-1] == "api_key_revoke"


def test_entries_of_others_are_not_told(each_api: Api) -> None:
    create_key("bob", "other")
    assert events(each_api) == ["api_key_create"]
    assert events(each_api, who="bob") == ["api_key_create", "api_key_create"]


def test_entries_are_found_by_resource(api: Api) -> None:
    owner_id = list_keys("alice")[0][0].owner_id
    path = {"model_id": "m", "tinker_path": "tinker://m/weights/a"}
    with api.database.write() as session:
        audit.record(session, owner_id, "checkpoints", "checkpoint_save", **path, seq_id=3)
    assert events(api, "?event_type=all") == ["api_key_create", "checkpoint_save"]
    assert events(api, "?event_type=organizations") == ["api_key_create"]
    assert events(api, "?event_type=teams") == events(api, "?event_type=projects") == []
    (entry,) = ask(api, "?event_type=checkpoints")
    assert entry["event_details"] == {**path, "seq_id": 3}
    assert (entry["model_id"], entry["tinker_path"], entry["purpose"]) == ("m", "tinker://m/weights/a", None)


def test_a_day_goes_from_midnight_to_midnight_in_utc(each_api: Api) -> None:
    owner_id = list_keys("alice")[0][0].owner_id
    midnight = datetime(2026, 3, 5, tzinfo=UTC)
    moments = {"before": -timedelta(microseconds=1), "first": timedelta(0), "last": timedelta(days=1, microseconds=-1)}
    with each_api.database.write() as session:
        for name, offset in {**moments, "after": timedelta(days=1)}.items():
            session.add(AuditEntry(owner_id=owner_id, resource="teams", event=name, details={}, at=midnight + offset))
    assert events(each_api, "?day=2026-03-05") == ["first", "last"]
    assert "first" not in events(each_api)


def test_without_a_day_it_is_today(api: Api) -> None:
    with api.database.write() as session:
        session.execute(update(AuditEntry).values(at=utc_now() - timedelta(days=2)))
    create_key("alice", "today")
    assert [entry["event_details"]["name"] for entry in ask(api)] == ["today"]


def test_the_last_of_all_days_is_a_day(api: Api) -> None:
    assert events(api, "?day=9999-12-31") == events(api, "?day=0001-01-01") == []


@pytest.mark.parametrize("query", ["?day=yesterday", "?event_type=everything"])
def test_a_wrong_question_is_refused(api: Api, query: str) -> None:
    assert api.get(f"/api/v1/audit{query}").status_code == 422


def test_changes_of_a_checkpoint_are_noted_and_failed_ones_are_not(each_api: Api) -> None:
    api = each_api
    with api.database.write() as session:
        run = factories.add_run(session, list_keys("alice")[0][0].owner_id)
        factories.add_checkpoint(session, run, "one")
    where = f"/api/v1/training_runs/{run.id}/checkpoints/weights"
    headers, answers = {"x-api-key": api.keys["alice"]}, []
    for method, path, body in (
        ("POST", f"{where}/one/publish", None),
        ("DELETE", f"{where}/one/publish", None),
        ("PUT", f"{where}/one/ttl", {"ttl_seconds": 86400}),
        ("DELETE", f"{where}/one", None),
        ("DELETE", f"{where}/one", None),
        ("POST", f"{where}/two/publish", None),
    ):
        answers.append(api.client.request(method, path, json=body, headers=headers).status_code)
    assert answers == [204, 204, 204, 204, 404, 404]
    entries = ask(api, "?event_type=checkpoints")
    names = ["checkpoint_publish", "checkpoint_unpublish", "checkpoint_set_ttl", "checkpoint_delete"]
    assert [entry["event"] for entry in entries] == names
    assert {entry["tinker_path"] for entry in entries} == {f"tinker://{run.id}/weights/one"}


def test_a_session_that_is_moved_into_a_project_is_noted(each_api: Api) -> None:
    session_id = each_api.session()
    where, body = f"sessions/{session_id}/project", {"project_id": "red"}
    assert each_api.send("PUT", where, body).status_code == 204
    assert each_api.send("PUT", where, body, who="bob").status_code == 404
    (entry,) = ask(each_api, "?event_type=projects")
    assert entry["event"] == "project_assign_session"
    assert entry["event_details"] == {"session_id": session_id, "project_id": "red"}
    assert events(each_api, "?event_type=projects", who="bob") == []


@pytest.mark.parametrize("path", ["audit", "billing/usage/events", "billing/usage/checkpoints/current"])
def test_an_unknown_parameter_is_refused_by_name(api: Api, path: str) -> None:
    window = "starting_on=2030-01-01T00:00:00Z&ending_before=2030-01-02T00:00:00Z&" if "events" in path else ""
    answer = api.send("GET", f"{path}?{window}nonsense=1")
    assert answer.status_code == 422
    assert "nonsense" in answer.json()["detail"]
