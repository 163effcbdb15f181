"""With tracing on, everything about one request is one trace, whichever process did it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.settings import Settings
from app.telemetry import traces
from app.telemetry.traces import TracesMissing, configure_traces
from tests.integration.conftest import Api, running
from tests.unit.workers.train.train_lab import Lab

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def spans() -> Iterator[Any]:
    """What this process has recorded."""
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    yield exporter
    configure_traces(Settings(), "off")


def trace_of(request_id: str) -> int:
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:16], "big")


def names(spans: Any, request_id: str) -> list[str]:
    mine = [span for span in spans.get_finished_spans() if span.context.trace_id == trace_of(request_id)]
    return [span.name for span in mine]


def test_web_records_submit_and_polls(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path, spans: Any
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path) as api:
        configure_traces(Settings(traces=1), "web", exporter=spans)
        model_id = api.run()
        step = {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 1e-3}}
        request_id = api.ok("optim_step", step, traceparent=PARENT)["request_id"]
        api.poll(request_id)
        assert names(spans, request_id) == ["POST /api/v1/optim_step", "POST /api/v1/retrieve_future"]
        (submit,) = [span for span in spans.get_finished_spans() if span.name == "POST /api/v1/optim_step"]
        (link,) = submit.links
        assert f"{link.context.trace_id:032x}" in PARENT and f"{link.context.span_id:016x}" in PARENT
        assert submit.attributes["status"] == 200 and submit.end_time > submit.start_time


def test_a_train_loop_adds_the_turn_that_served_it(lab: Lab, spans: Any) -> None:
    configure_traces(Settings(traces=1), "train", exporter=spans)
    loop, client = lab.worker(), lab.client()
    number, step = client.train(1)
    lab.work(loop)
    assert names(spans, f"{client.model_id}:{number}") == ["forward_backward"]
    assert names(spans, f"{client.model_id}:{step}") == ["optim_step"]
    (turn,) = [span for span in spans.get_finished_spans() if span.name == "forward_backward"]
    assert turn.attributes["tokens"] == 14 and turn.attributes["worker_id"] == loop._worker_id


def test_a_share_of_requests_is_traced_and_all_processes_choose_the_same(spans: Any) -> None:
    configure_traces(Settings(traces=0.25), "web", exporter=spans)
    ids = [f"run:{number}" for number in range(400)]
    chosen = [request_id for request_id in ids if traces.is_traced(request_id)]
    assert 60 < len(chosen) < 140
    configure_traces(Settings(traces=0.25), "train", exporter=spans)
    assert chosen == [request_id for request_id in ids if traces.is_traced(request_id)]


def test_without_the_setting_nothing_is_imported_or_recorded(api: Api, spans: Any) -> None:
    api.run()
    assert spans.get_finished_spans() == () and not traces.is_traced("any")


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(TracesMissing, match=r"tinworks\[otel\]"):
        configure_traces(Settings(traces=1), "web")
    configure_traces(Settings(), "off")
