"""An HTTP proxy in threads of this process, between the SDK and the service, that mistreats what passes through it."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

POLL = "/api/v1/retrieve_future"
CALM = ("/api/v1/session_heartbeat", "/api/v1/telemetry", "/api/v1/client/", "/api/v1/auth/")
"""Routes that the SDK calls on a timer, or before it is set up: no operations, forwarded as they are."""
_NOT_FORWARDED = ("host", "connection", "content-length", "accept-encoding", "transfer-encoding")


@dataclass(frozen=True)
class Sent:
    """A request as it came. Its handler serves the next one of the same connection when this is answered."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class BadNetwork:
    """The proxy. What it does to a request is `treat`'s matter, which a test defines."""

    def __init__(self, upstream: str) -> None:
        self.faults: Counter[str] = Counter()
        self.answers: defaultdict[tuple[str, int], set[bytes]] = defaultdict(set)
        """Every body that an operation was answered with, by its route and number."""
        self._upstream = httpx.Client(base_url=upstream, timeout=60, limits=httpx.Limits(max_connections=None))
        self.copies = ThreadPoolExecutor(16)
        self._lock = threading.Lock()
        self._numbers: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._attempts: Counter[tuple[str, int]] = Counter()
        network = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def _pass_on(self) -> None:
                network.handle(self)

            do_GET = do_POST = do_DELETE = _pass_on

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self.copies.shutdown()
        self._upstream.close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Take a request, and what becomes of it."""
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_FORWARDED}
        sent = Sent(request.command, request.path, headers, body)
        if sent.method != "POST" or sent.path.startswith(CALM):
            self.reply(request, self.forward(sent))
            return
        self.treat(request, sent, *self._count(sent))

    def treat(self, request: BaseHTTPRequestHandler, sent: Sent, number: int, attempt: int) -> None:
        """Do something to the `attempt`-th try (from 1) of the `number`-th operation of its route (from 0)."""
        raise NotImplementedError

    def forward(self, sent: Sent) -> httpx.Response:
        """What the service answers."""
        return self._upstream.request(sent.method, sent.path, headers=sent.headers, content=sent.body)

    def noted(self, sent: Sent, number: int, answer: httpx.Response) -> httpx.Response:
        """Remember what an operation was answered with."""
        if sent.path != POLL:
            with self._lock:
                self.answers[sent.path, number].add(answer.content)
        return answer

    def drop(self, request: BaseHTTPRequestHandler) -> None:
        """Answer nothing; the connection ends."""
        request.close_connection = True

    def fail(self, request: BaseHTTPRequestHandler) -> None:
        """Answer as a gateway that has lost the service."""
        self.reply(request, httpx.Response(502, headers={"retry-after-ms": "1"}, content=b"upstream went away"))

    def _count(self, sent: Sent) -> tuple[int, int]:
        """Which operation of its route this is, and how often it has come. A poll has the number of its future."""
        with self._lock:
            numbers = self._numbers[sent.path]
            number = numbers.setdefault(_name(sent), len(numbers))
            self._attempts[sent.path, number] += 1
            return number, self._attempts[sent.path, number]

    def reply(self, request: BaseHTTPRequestHandler, answer: httpx.Response) -> None:
        kept = {n: v for n, v in answer.headers.items() if n.lower() not in (*_NOT_FORWARDED, "date", "server")}
        head = "".join(f"{name}: {value}\r\n" for name, value in kept.items())
        start = f"HTTP/1.1 {answer.status_code} {answer.reason_phrase}\r\nContent-Length: {len(answer.content)}\r\n"
        request.wfile.write(f"{start}{head}\r\n".encode() + answer.content)


def _name(sent: Sent) -> str:
    """What stays the same when the SDK sends it again: an ephemeral save takes another sampler number each time."""
    if sent.path == POLL:
        return str(json.loads(sent.body)["request_id"])
    if sent.path.endswith("/save_weights_for_sampler"):
        return str(json.loads(sent.body)["seq_id"])
    return hashlib.sha256(sent.body).hexdigest()
