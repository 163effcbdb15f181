"""Every sample that ends is counted, in metrics and in its trace, whatever becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.db import Database
from app.settings import Settings
from app.telemetry.traces import configure_traces
from app.wire.sampling import StoredSample
from app.wire.types import SampledSequence, SampleRequest, SampleResult, SamplingParams
from workers.metrics import REGISTRY
from workers.sample.usage import SampleUsage

STORED = StoredSample("o", "s", "tiny", None, SampleRequest("s:sample:0:1", [1, 2, 3], SamplingParams()))


def result(*lengths: int, cached: int = 0) -> SampleResult:
    sequences = [SampledSequence("length", np.zeros(n, int), np.zeros(n), None) for n in lengths]
    return SampleResult(sequences, prompt_cache_hit_tokens=cached)


def figures() -> dict[str, float]:
    names: list[tuple[str, dict[str, str]]] = [
        ("samples_total", {"outcome": "done"}),
        ("samples_total", {"outcome": "failed"}),
        ("sampled_tokens_total", {}),
        ("prompt_tokens_total", {"how": "cached"}),
        ("prompt_tokens_total", {"how": "computed"}),
    ]
    return {
        " ".join([name, *labels.values()]): REGISTRY.get_sample_value(f"tinworks_{name}", labels) or 0.0
        for name, labels in names
    }


def gained(folder: Path, *outcomes: SampleResult | Exception) -> dict[str, float]:
    """What these outcomes of one request add."""
    before = figures()
    usage = SampleUsage(Database(f"sqlite:///{folder}/never-asked.db"))
    for outcome in outcomes:
        usage.counted(STORED, lambda outcome: None)(outcome)
    return {name: value - before[name] for name, value in figures().items() if value != before[name]}


def test_tokens_are_counted_by_where_they_came_from(tmp_path: Path) -> None:
    assert gained(tmp_path, result(4, 5, cached=2)) == {
        "samples_total done": 1,
        "sampled_tokens_total": 9,
        "prompt_tokens_total cached": 2,
        "prompt_tokens_total computed": 1,
    }


def test_failures_are_counted_too(tmp_path: Path) -> None:
    assert gained(tmp_path, RuntimeError("away")) == {"samples_total failed": 1}


@pytest.fixture
def spans() -> Iterator[Any]:
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    configure_traces(Settings(traces=1), "sample", exporter=exporter)
    yield exporter
    configure_traces(Settings(), "off")


def test_a_sample_is_part_of_its_requests_trace(spans: Any, tmp_path: Path) -> None:
    gained(tmp_path, result(4))
    (span,) = spans.get_finished_spans()
    assert (span.name, span.attributes["request_id"]) == ("sample", "s:sample:0:1")
