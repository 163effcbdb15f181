"""Middleware: how long every route takes, for metrics and traces, and a place for the ids that logs shall name."""

from __future__ import annotations

import time

from prometheus_client import Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.telemetry.context import begin_request, known_ids
from app.telemetry.metrics import OTHER_ROUTE, WebMetrics
from app.telemetry.traces import is_traced, record

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER_METHOD = "other"


class MeasureRequests:
    """Counts each answer under its route's template, so that ids in paths make no series of their own."""

    def __init__(self, app: ASGIApp, metrics: WebMetrics) -> None:
        self._app = app
        self._metrics = metrics
        self._latencies: dict[tuple[str, str, int], Histogram] = {}
        """Finding a metric by its labels takes longer than counting."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        begin_request()

        async def measured(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._count(scope, message["status"], time.perf_counter() - began)
            await send(message)

        await self._app(scope, receive, measured)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", OTHER_ROUTE)
        method = scope["method"] if scope["method"] in _METHODS else OTHER_METHOD
        key = method, route, status
        latency = self._latencies.get(key)
        if latency is None:
            latency = self._latencies[key] = self._metrics.requests.labels(*map(str, key))
        latency.observe(seconds)
        request_id = known_ids().get("request_id")
        if is_traced(request_id):
            sent = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"traceparent"), "")
            record(f"{method} {route}", request_id, seconds, traceparent=sent, status=status)
