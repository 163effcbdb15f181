"""What a web process measures, and where it shows it.

Three sources make one page: the process's own requests, what database and Redis know of queues and workers, and what
the workers have packed into their rows. Nothing names a tenant, a key or a run: labels are routes, pools, workers,
kinds. The second and third are the same from every web process: queries take their `max`.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CollectorRegistry, Gauge, Histogram, start_http_server
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from app.settings import Settings

log = structlog.get_logger(__name__)

_LATENCIES_S = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
OTHER_ROUTE = "other"
"""What is counted for a path that no route has: its text is the client's."""


class WebMetrics:
    """The metrics of one web process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Histogram(
            "tinworks_http_request_seconds",
            "Time until the answer begins; polls are held",
            ["method", "route", "status"],
            buckets=_LATENCIES_S,
            registry=self.registry,
        )
        self._lost = Gauge(
            "tinworks_doorbells_lost",
            "Doorbells that could not be sent since the process began",
            registry=self.registry,
        )
        self._polls = Gauge("tinworks_polls_waiting", "Polls that are held now", registry=self.registry)
        self._server: WSGIServer | None = None
        self._fleet: Collector | None = None

    def watch(self, *, doorbells_lost: Callable[[], int], polls: Callable[[], int], fleet: Collector) -> None:
        """Show these as well, whenever somebody looks."""
        self._lost.set_function(doorbells_lost)
        self._polls.set_function(polls)
        self.registry.register(fleet)
        self._fleet = fleet

    def text(self) -> bytes:
        """The page. Asks the database: not for the event loop."""
        return generate_latest(self.registry)

    def serve(self, port: int) -> None:
        """Show the page on a port of its own, until `close`. One that is taken is no reason not to serve clients."""
        try:
            self._server, _ = start_http_server(port, registry=self.registry)
        except OSError as error:
            log.error("metrics_port_taken", port=port, error=str(error))

    def close(self) -> None:
        """Stop showing it there, and the fleet."""
        if self._fleet is not None:
            self.registry.unregister(self._fleet)
            self._fleet = None
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def may_read(settings: Settings, authorization: str) -> bool:
    """Whether the header carries the token of the metrics; without a token nobody does."""
    scheme, _, token = authorization.partition(" ")
    right = hmac.compare_digest(token.strip().encode(), settings.metrics_token.encode())
    return bool(settings.metrics_token) and scheme.lower() == "bearer" and right
