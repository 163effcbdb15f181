"""Limits of a tenant: a clear 429 where the SDK comes back, and never one where it would give up."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from app.fleet.service import set_draining
from app.runs.models import Run
from tests.integration.conftest import Api, running


def test_rest_requests_over_the_rate_are_told_when_to_come_again(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path, requests_per_s=0.2) as api:
        statuses = [api.get("/api/v1/sessions").status_code for _ in range(4)]
        assert statuses == [200, 200, 429, 429]
        refused = api.get("/api/v1/training_runs")
        assert 1 <= int(refused.headers["retry-after"]) <= 5
        assert "0.2 requests per second" in refused.json()["detail"]
        assert api.get("/api/v1/sessions", who="bob").status_code == 200


def test_training_and_polls_go_on_while_a_tenant_is_over_its_rate(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path, batch: Callable[..., bytes]
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path, requests_per_s=0.01) as api:
        session_id = api.session()
        while api.get("/api/v1/sessions").status_code != 429:
            pass
        created = api.create(session_id)
        model_id = created["model_id"]
        assert api.forward_backward(batch(model_id, 1)).status_code == 200
        step = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 1e-3}}
        assert api.post("optim_step", step).status_code == 200
        assert api.poll(created["request_id"]).status_code == 408
        assert api.post("session_heartbeat", {"session_id": session_id}).status_code == 200


def test_a_run_too_many_waits_and_its_polls_say_why(
    configure: Callable[..., None], database_url: str, redis_url: str, tmp_path: Path
) -> None:
    with running(configure, database_url, redis_url, tmp_path, runs_per_tenant=1) as api:
        held = api.run()
        with api.database.write() as session:
            run = session.get_one(Run, held)
            run.worker_id, run.lease_expires_at = "somebody", time.time() + 60
        waiting = api.create(api.session(), 7)
        told = api.poll(waiting["request_id"]).json()
        assert told["queue_state"] == "paused_capacity"
        assert told["queue_state_reason"].startswith("1 runs of yours are in training")
        others = api.create(api.session("bob"), 7, who="bob")
        assert api.poll(others["request_id"], who="bob").json()["queue_state"] == "active"


def test_a_poll_says_which_sequence_id_is_awaited(each_api: Api) -> None:
    api = each_api
    model_id = api.run()
    step = {"model_id": model_id, "seq_id": 3, "adam_params": {"learning_rate": 1e-3}}
    told = api.poll(api.ok("optim_step", step)["request_id"]).json()
    assert told["queue_state_reason"] == f"seq_id 1 of {model_id} has not arrived yet"


def test_while_every_worker_is_being_emptied_polls_say_so(api: Api) -> None:
    created = api.create(api.session())
    with api.database.write() as session:
        assert set_draining(session, "worker", True)
    told = api.poll(created["request_id"]).json()
    assert told["queue_state"] == "paused_capacity" and "being emptied" in told["queue_state_reason"]
    missing = api.client.get("/api/v1/healthz").json()["missing"]
    assert missing == ["no live sample worker for tiny", "no live train worker for tiny"]
