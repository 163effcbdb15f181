"""Requests that can be read, and yet say nothing that the service could keep or give back."""

from __future__ import annotations

import pytest

from tests.integration.conftest import Api


def sampler(api: Api) -> str:
    body = {"session_id": api.session(), "sampling_session_seq_id": 0, "base_model": "tiny"}
    return str(api.ok("create_sampling_session", body)["sampling_session_id"])


def sample(api: Api, **params: object) -> dict[str, object]:
    prompt = {"chunks": [{"tokens": [1]}]}
    return {"sampling_session_id": sampler(api), "seq_id": 0, "prompt": prompt, "sampling_params": params}


@pytest.mark.parametrize("field", ["max_tokens", "top_k"])
def test_a_number_that_no_sampler_can_count_to_is_refused(api: Api, field: str) -> None:
    answer = api.post("asample", sample(api, **{field: 10**30}))
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(f"sampling_params.{field}: ")


@pytest.mark.parametrize(
    "text",
    ['{"display_name": "\\ud800"}', '{"user_metadata": {"a": "\\udc00"}}', '{"\\ud800": 1}', '{"tags": ["\\ud800"]}'],
)
def test_half_a_character_is_no_json(api: Api, text: str) -> None:
    answer = api.post("create_session", text.encode())
    assert (answer.status_code, answer.json()) == (400, {"detail": "body: not valid JSON"})
    assert api.send("POST", "sessions/search", {}).status_code == 200


def test_a_large_number_in_metadata_comes_back_as_one(api: Api) -> None:
    made = api.ok("create_session", b'{"user_metadata": {"n": 1111111111111111111111111}}')
    assert float(api.seen(f"sessions/{made['session_id']}")["user_metadata"]["n"]) == 1111111111111111111111111.0
    assert api.send("POST", "sessions/search", {}).status_code == 200


def test_metadata_too_deep_for_an_answer_is_refused(api: Api) -> None:
    text = '{"user_metadata": ' + '{"a": ' * 300 + "1" + "}" * 301
    answer = api.post("create_session", text.encode())
    assert answer.status_code == 422
    assert answer.json()["detail"] == "user_metadata: its values are nested too deeply"


def test_a_refusal_does_not_repeat_megabytes(api: Api) -> None:
    name = "x" * 2**20
    assert len(api.post("create_session", {name: 1}).content) < 4000
    model_id = api.run()
    api.ok("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {name: 1}})
    assert len(api.poll(f"{model_id}:1").content) < 4000


def test_json_that_is_no_batch_is_bounded_by_itself(api: Api) -> None:
    body = b'{"tags": ["' + b"x" * 2**25 + b'"]}'
    for path in ("create_session", "optim_step"):
        answer = api.post(path, body)
        assert answer.status_code == 413
        assert answer.json()["detail"].startswith("body: JSON of more than")


def test_a_waiting_sample_is_told_about_its_own_pool(api: Api) -> None:
    request_id = api.ok("asample", sample(api))["request_id"]
    answer = api.poll(request_id)
    assert answer.status_code == 408
    assert answer.json()["queue_state"] == "active", answer.text  # the pool has a live worker


def test_an_empty_idempotency_key_is_none(each_api: Api) -> None:
    made = {each_api.ok("create_session", {}, x_idempotency_key="")["session_id"] for _ in range(2)}
    assert len(made) == 2


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+01:00", "9999-12-31T23:59:59-01:00"])
def test_a_time_beyond_all_calendars_is_refused(api: Api, time: str) -> None:
    answer = api.post("sessions/search", {"cursor": {"last_created_at": time, "last_session_id": "s"}})
    assert answer.status_code == 422 and "cursor.last_created_at: " in answer.json()["detail"]
    window = {"starting_on": time, "ending_before": time}
    answer = api.client.get("/api/v1/billing/usage/events", params=window, headers={"x-api-key": api.keys["alice"]})
    assert answer.status_code in (400, 422), answer.text
