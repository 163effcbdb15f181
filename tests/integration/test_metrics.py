"""`/metrics`: who may read it, what it shows, and what it must not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.engine import make_url

from app.fleet import service as fleet
from app.sampling.keys import unfinished_key
from app.telemetry.exposition import pack
from app.up.network import free_port
from tests import factories
from tests.integration.conftest import Api, running
from tests.services import PostgresServer
from tests.unit.workers.train.train_lab import Lab
from workers import metrics

TOKEN = "a-long-token-for-tests"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def shown(api: Api) -> str:
    return api.client.app.state.services.metrics.text().decode()  # type: ignore[attr-defined, no-any-return]


def samples(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(text: str, name: str, **labels: str) -> float:
    return samples(text)[name, tuple(sorted(labels.items()))]


def test_nobody_sees_metrics_unless_a_token_is_set(api: Api) -> None:
    for headers in ({}, {"authorization": "Bearer "}, {"x-api-key": api.keys["alice"]}):
        assert api.client.get("/metrics", headers=headers).status_code == 404


def test_who_has_the_token_sees_them(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path, metrics_token=TOKEN) as api:
        answer = api.client.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200 and value(answer.text, "tinworks_database_up") == 1
        for wrong in (f"Bearer {TOKEN}x", f"Basic {TOKEN}", TOKEN, "Bearer é"):
            answer = api.client.get("/metrics", headers=[(b"authorization", wrong.encode())])
            assert answer.status_code == 404


def test_a_port_of_their_own_shows_them_to_everybody(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    port = free_port()
    with running(configure, sqlite_url, redis_url, tmp_path, metrics_port=port):
        assert value(httpx.get(f"http://127.0.0.1:{port}/metrics").text, "tinworks_redis_up") == 1


def test_a_taken_port_does_not_keep_web_from_serving(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    port = free_port()
    with running(configure, sqlite_url, redis_url, tmp_path, metrics_port=port):
        with running(configure, sqlite_url, redis_url, tmp_path, metrics_port=port) as second:
            assert second.client.get("/livez").status_code == 200


def test_requests_are_counted_by_the_template_of_their_route(api: Api) -> None:
    session_id = api.session()
    for name in (session_id, "no-such-session"):
        api.get(f"/api/v1/sessions/{name}")
    api.get("/somewhere/" + "x" * 50)
    api.client.request("INVENTED", "/livez")
    text, route = shown(api), "/api/v1/sessions/{session_id}"
    assert value(text, "tinworks_http_request_seconds_count", method="GET", route=route, status="200") == 1
    assert value(text, "tinworks_http_request_seconds_count", method="GET", route=route, status="404") == 1
    assert value(text, "tinworks_http_request_seconds_count", method="GET", route="other", status="404") == 1
    assert session_id not in text and "xxxx" not in text and "INVENTED" not in text


def test_queues_are_shown_with_their_depth_and_age(each_api: Api) -> None:
    api = each_api
    model_id = api.run()
    for seq_id in (1, 2):
        api.ok("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 1e-3}})
    text = shown(api)
    assert value(text, "tinworks_queue_operations", pool="tiny") == 2
    assert value(text, "tinworks_queue_runs", pool="tiny") == 1
    assert value(text, "tinworks_queue_age_seconds", pool="tiny") > 0
    assert value(text, "tinworks_workers", pool="tiny", role="train", state="ready") == 1


def test_samples_that_nobody_holds_are_shown_with_their_age(api: Api) -> None:
    services = api.client.app.state.services  # type: ignore[attr-defined]
    import redis

    with redis.Redis.from_url(services.settings.redis_url) as client:
        seconds, _ = client.time()  # type: ignore[misc]
        client.zadd(unfinished_key("tiny"), {"claimed": seconds + 10, "waits": seconds - 30, "given-up": 0})
    text = shown(api)
    assert value(text, "tinworks_unfinished_samples", pool="tiny") == 3
    assert 30 <= value(text, "tinworks_sample_age_seconds", pool="tiny") < 60


def test_everything_that_the_dashboard_counts_on_is_shown(api: Api) -> None:
    names = {family.name for family in text_string_to_metric_families(shown(api))}
    stores = {"tinworks_database_up", "tinworks_redis_up"}
    assert stores | {"tinworks_workers", "tinworks_unfinished_samples", "tinworks_sample_age_seconds"} <= names


def test_no_tenant_key_or_run_is_named(api: Api) -> None:
    runs = [api.run(who=who) for who in ("alice", "bob")]
    text = shown(api)
    for secret in ("alice", "bob", *runs, *(run.split(":")[0] for run in runs), *api.keys.values()):
        assert secret not in text


def test_what_workers_measure_is_shown_with_their_names(api: Api) -> None:
    packed = [{"name": "tinworks_slots", "type": "gauge", "help": "Runs", "samples": [["tinworks_slots", {}, 4.0]]}]
    with api.database.write() as session:
        for number in (1, 2):
            name = factories.add_worker(session, id=f"w{number}", pool="tiny")
            fleet.worker_seen(session, name, detail={"metrics": packed})
    text = shown(api)
    assert [value(text, "tinworks_slots", worker=f"w{n}", pool="tiny") for n in (1, 2)] == [4, 4]
    assert text.count("# TYPE tinworks_slots gauge") == 1


def test_a_drained_worker_is_no_ready_one(api: Api) -> None:
    with api.database.write() as session:
        fleet.set_draining(session, "worker", True)
    text = shown(api)
    assert value(text, "tinworks_workers", pool="tiny", role="train", state="draining") == 1
    assert "ready" not in text


def test_without_its_database_the_page_says_only_that(
    configure: Callable[..., None], postgres_url: str, shared_postgres: PostgresServer, redis_url: str, tmp_path: Path
) -> None:
    with running(configure, postgres_url, redis_url, tmp_path) as api:
        shared_postgres.lock(str(make_url(postgres_url).database))
        text = shown(api)
        assert value(text, "tinworks_database_up") == 0 and value(text, "tinworks_redis_up") == 1
        assert "tinworks_queue_operations" not in text


def test_a_train_loop_counts_its_work(lab: Lab) -> None:
    def measured(name: str, **labels: str) -> float:
        return metrics.REGISTRY.get_sample_value(f"tinworks_{name}", labels) or 0.0

    names: list[tuple[str, dict[str, str]]] = [
        ("trained_tokens_total", {}),
        ("rows_total", {"what": "token"}),
        ("rows_total", {"what": "padding"}),
        ("micro_batches_total", {}),
        ("operations_total", {"kind": "optim_step", "outcome": "done"}),
        ("operations_total", {"kind": "forward_backward", "outcome": "failed"}),
        ("leases_total", {"change": "taken"}),
        ("leases_total", {"change": "released"}),
        ("pass_runs_sum", {}),
        ("snapshots_total", {"outcome": "written"}),
    ]
    before = [measured(name, **labels) for name, labels in names]
    loop, client = lab.worker(), lab.client()
    client.train(1)  # 9 and 5 tokens: padded to 18 rows
    client.bad_forward_backward()
    client.train(2)
    lab.work(loop)
    loop.hand_over()
    gained = [measured(name, **labels) - was for (name, labels), was in zip(names, before, strict=True)]
    assert gained[:8] == [28, 28, 8, 2, 2, 1, 1, 1]
    assert gained[8] >= 1 and gained[9] == 1
    for phase in ("claim", "restore", "pass", "commit", "notify"):
        assert measured("phase_seconds_total", phase=phase) > 0
    assert loop.progress.phase == "idle"


def test_a_recovery_is_counted_with_what_it_replays(lab: Lab) -> None:
    first, second, client = lab.worker(), lab.worker(), lab.client()
    client.train(1)
    lab.work(first)
    assert first.snapshot_lag().operations == 3
    replayed = metrics.REGISTRY.get_sample_value("tinworks_replayed_operations_total") or 0.0
    lab.kill(first)
    client.train(2)
    lab.work(second)
    assert metrics.REGISTRY.get_sample_value("tinworks_replayed_operations_total") == replayed + 3
    assert (metrics.REGISTRY.get_sample_value("tinworks_recovery_seconds_count") or 0) >= 2


def test_what_a_worker_packs_is_json_of_a_few_kilobytes() -> None:
    assert len(json.dumps(pack(metrics.REGISTRY))) < 30_000
