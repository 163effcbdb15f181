"""Who may ask, and the life of a session, over HTTP."""

from __future__ import annotations

import pytest

from app.accounts.service import list_keys, revoke_key
from tests.integration.conftest import Api

PATHS = ["client/config", "create_session", "create_model", "forward_backward", "asample", "retrieve_future"]


@pytest.mark.parametrize("path", PATHS)
def test_a_request_without_a_key_is_refused(api: Api, path: str) -> None:
    answer = api.client.post(f"/api/v1/{path}", json={})
    assert answer.status_code == 401
    assert "X-API-Key: missing" in answer.json()["detail"]
    assert "www-authenticate" in answer.headers


def test_a_key_that_nobody_made_is_refused(api: Api) -> None:
    api.keys["mallory"] = "tml-mallory"
    answer = api.post("create_session", {}, who="mallory")
    assert answer.status_code == 401
    assert "tinworks keys create" in answer.json()["detail"]


def test_a_revoked_key_is_refused(api: Api) -> None:
    assert api.post("create_session", {}).status_code == 200
    revoke_key(list_keys("alice")[0][0].id)
    assert api.post("create_session", {}).status_code == 401
    assert api.post("create_session", {}, who="bob").status_code == 200


def test_a_client_is_told_how_to_behave(api: Api) -> None:
    config = api.ok("client/config", {"sdk_version": "0.38.0", "something_new": 1})
    assert config["parallel_fwdbwd_chunks"] is True
    assert config["sample_max_concurrent_requests"] > 0
    assert "refresh_interval_sec" in api.ok("client/dynamic_config", {"sdk_version": "0.38.0"})


def test_telemetry_is_taken(api: Api) -> None:
    assert api.ok("telemetry", {"events": [{"event": "x"}], "session_id": "s", "new": 1}) == {"status": "accepted"}


def test_a_repeated_creation_is_the_same_session(api: Api, idempotency_key: str) -> None:
    ids = {api.ok("create_session", {}, x_idempotency_key=idempotency_key)["session_id"] for _ in range(3)}
    assert len(ids) == 1


def test_an_idempotency_key_is_its_owners_own(api: Api, idempotency_key: str) -> None:
    ids = {api.ok("create_session", {}, who=who, x_idempotency_key=idempotency_key)["session_id"] for who in api.keys}
    assert len(ids) == 2


def test_creations_without_a_key_are_different_sessions(api: Api) -> None:
    assert api.session() != api.session()


def test_what_the_sdk_says_of_a_session_is_taken(api: Api) -> None:
    body = {
        "tags": ["a"],
        "user_metadata": {"k": {"nested": [1, None]}},
        "sdk_version": "0.38.0",
        "project_id": "p",
        "display_name": "My run",
        "type": "create_session",
    }
    assert api.ok("create_session", body)["session_id"]


def test_a_heartbeat_keeps_a_session(api: Api) -> None:
    assert api.ok("session_heartbeat", {"session_id": api.session()}) == {"type": "session_heartbeat"}


@pytest.mark.parametrize("path", ["session_heartbeat", "sessions/{}/finish"])
def test_somebody_elses_session_is_not_there(api: Api, path: str) -> None:
    theirs = api.session("bob")
    for session_id in (theirs, "never-was"):
        body = {"session_id": session_id} if path == "session_heartbeat" else {"reason": {"type": "success"}}
        assert api.post(path.format(session_id), body).status_code == 404
    assert api.post("session_heartbeat", {"session_id": theirs}, who="bob").status_code == 200


def finish(api: Api, session_id: str, reason: str = "success") -> int:
    return api.post(f"sessions/{session_id}/finish", {"reason": {"type": reason}, "detail": None}).status_code


def test_a_finished_session_is_gone(api: Api) -> None:
    session_id = api.session()
    assert finish(api, session_id) == 200
    assert api.post("session_heartbeat", {"session_id": session_id}).status_code == 410
    body = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    assert api.post("create_model", body).status_code == 410
    sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    assert api.post("create_sampling_session", sampling).status_code == 410


def test_finishing_twice_is_no_error(api: Api) -> None:
    session_id = api.session()
    assert [finish(api, session_id, reason) for reason in ("errored", "success")] == [200, 200]


def test_a_run_of_a_finished_session_takes_no_more(api: Api) -> None:
    model_id = api.run()
    finish(api, model_id.partition(":")[0])
    assert api.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}}).status_code == 410


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("create_session", {"tagz": []}, "tagz: unknown field"),
        ("create_session", {"tags": "a"}, "tags"),
        ("session_heartbeat", {}, "session_id"),
        ("session_heartbeat", {"session_id": "a/b"}, "session_id"),
        ("sessions/x/finish", {"reason": {"type": "bored"}}, "reason.type"),
    ],
)
def test_a_wrong_field_is_refused_by_name(api: Api, path: str, body: object, field: str) -> None:
    answer = api.post(path, body)
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(field)


@pytest.mark.parametrize("path", ["create_session", "retrieve_future", "optim_step", "nowhere"])
def test_errors_are_json_of_known_length_and_not_compressed(api: Api, path: str) -> None:
    answer = api.post(path, b"not json", accept_encoding="gzip, deflate, zstd")
    assert 400 <= answer.status_code < 500
    assert isinstance(answer.json()["detail"], str)
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["content-length"]) == len(answer.content) > 0
    assert "content-encoding" not in answer.headers
