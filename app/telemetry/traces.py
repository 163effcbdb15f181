"""Traces with OpenTelemetry, for who installs `tinworks[otel]` and sets `TINWORKS_TRACES`.

Every request is one trace, and the trace's id follows from the request's id. So the submit, the polls, the pass or the
sample and whatever else is about a request end up together, although the processes tell each other nothing of it: no
row, message or result carries a trace. Whether a request is traced follows from that id as well. A `traceparent` that a
client sends is linked to the span of its submit.

Where spans go is OpenTelemetry's own configuration (`OTEL_EXPORTER_OTLP_ENDPOINT` and the like).
"""

from __future__ import annotations

import hashlib
import re
import time
from typing import Any

from app.settings import Settings

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_tracer: Any = None
_threshold = 0


class TracesMissing(RuntimeError):
    """Traces are wanted, and what they need is not installed."""


def configure_traces(settings: Settings, service: str, *, exporter: Any = None) -> None:
    """Begin to trace, if the settings say so. `exporter`: where spans go; unset: OTLP over HTTP.

    Raises TracesMissing.
    """
    global _tracer, _threshold
    _tracer, _threshold = None, int(settings.traces * 2**64)
    if not settings.traces:
        return
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        if exporter is None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            processor: Any = BatchSpanProcessor(OTLPSpanExporter())
        else:
            processor = SimpleSpanProcessor(exporter)
    except ImportError as error:
        raise TracesMissing("TINWORKS_TRACES is set: install `tinworks[otel]`, or leave it unset") from error
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(processor)
    _tracer = provider.get_tracer("tinworks")


def is_traced(request_id: str | None) -> bool:
    """Whether spans of this request go anywhere."""
    return _tracer is not None and request_id is not None and _ids(request_id)[0] % 2**64 < _threshold


def record(
    name: str, request_id: str | None, seconds: float, *, traceparent: str = "", **attributes: str | int | float | bool
) -> None:
    """Note something about a request that took so long and has just ended."""
    if request_id is None or not is_traced(request_id):
        return
    from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    sampled = TraceFlags(TraceFlags.SAMPLED)
    trace_id, span_id = _ids(request_id)
    root = NonRecordingSpan(SpanContext(trace_id, span_id, is_remote=True, trace_flags=sampled))
    links = []
    if sent := _TRACEPARENT.fullmatch(traceparent):
        links.append(Link(SpanContext(int(sent[1], 16), int(sent[2], 16), is_remote=True)))
    ended_ns = time.time_ns()
    span = _tracer.start_span(
        name,
        context=set_span_in_context(root),
        start_time=ended_ns - int(seconds * 1e9),
        links=links,
        attributes={"request_id": request_id, **attributes},
    )
    span.end(ended_ns)


def _ids(request_id: str) -> tuple[int, int]:
    """Trace and root span of a request."""
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:24], "big")
