"""A bad network between the SDK and the service: lost answers, dropped connections, requests that arrive twice.

Every operation is forwarded and then said to have failed, so the SDK sends all of them again; what is drawn further is
decided by the seed, the route, the operation's number and the attempt alone.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import tinker
from tinker import types

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, largest_gap, logprobs
from tests.e2e.service import Service

DATA = batch(61, [24, 40, 9])
STEPS = 15
SAVE_EVERY = 6
SEED = 7
DROPS, REPEATS, POLL_DROPS = 0.15, 0.4, 0.08
POLL = "/api/v1/retrieve_future"
CALM = ("/api/v1/session_heartbeat", "/api/v1/telemetry", "/api/v1/client/", "/api/v1/auth/")
"""Routes that the SDK calls on a timer, or before it is set up: no operations, forwarded as they are."""
_NOT_FORWARDED = ("host", "connection", "content-length", "accept-encoding", "transfer-encoding")


class BadNetwork:
    """An HTTP proxy in threads of this process that does its worst, the same each time."""

    def __init__(self, upstream: str) -> None:
        self.faults: Counter[str] = Counter()
        self.answers: defaultdict[tuple[str, int], set[bytes]] = defaultdict(set)
        """Every body that an operation was answered with, by its route and number."""
        self._upstream = httpx.Client(base_url=upstream, timeout=60, limits=httpx.Limits(max_connections=None))
        self._twice = ThreadPoolExecutor(16)
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
        self._twice.shutdown()
        self._upstream.close()

    def handle(self, request: BaseHTTPRequestHandler) -> None:
        """Forward a request once or twice, and answer it, or not."""
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        if request.command != "POST" or request.path.startswith(CALM):
            self._reply(request, self._forward(request, body))
            return
        number, attempt = self._count(request.path, body)
        draw = random.Random(f"{SEED}:{request.path}:{number}:{attempt}")
        twice, dropped = draw.random() < REPEATS, draw.random() < (POLL_DROPS if request.path == POLL else DROPS)
        copies = [self._twice.submit(self._forward, request, body) for _ in range(2 if twice else 1)]
        received = [copy.result() for copy in copies]
        self.faults["repeated"] += twice
        if request.path != POLL:
            with self._lock:
                self.answers[request.path, number] |= {answer.content for answer in received}
            if attempt == 1:
                self.faults["502"] += 1
                lost = httpx.Response(502, headers={"retry-after-ms": "1"}, content=b"upstream went away")
                self._reply(request, lost)
                return
        if dropped and attempt <= 2:
            self.faults["dropped"] += 1
            request.close_connection = True
            return
        self._reply(request, draw.choice(received))

    def _count(self, path: str, body: bytes) -> tuple[int, int]:
        """Which operation of its route this is, and how often it has come. A poll has the number of its future."""
        with self._lock:
            numbers = self._numbers[path]
            number = numbers.setdefault(_name(path, body), len(numbers))
            self._attempts[path, number] += 1
            return number, self._attempts[path, number]

    def _forward(self, request: BaseHTTPRequestHandler, body: bytes) -> httpx.Response:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _NOT_FORWARDED}
        return self._upstream.request(request.command, request.path, headers=headers, content=body)

    def _reply(self, request: BaseHTTPRequestHandler, answer: httpx.Response) -> None:
        kept = {n: v for n, v in answer.headers.items() if n.lower() not in (*_NOT_FORWARDED, "date", "server")}
        head = "".join(f"{name}: {value}\r\n" for name, value in kept.items())
        start = f"HTTP/1.1 {answer.status_code} {answer.reason_phrase}\r\nContent-Length: {len(answer.content)}\r\n"
        request.wfile.write(f"{start}{head}\r\n".encode() + answer.content)


def _name(path: str, body: bytes) -> str:
    """What stays the same when the SDK sends it again: an ephemeral save takes another sampler number each time."""
    if path == POLL:
        return str(json.loads(body)["request_id"])
    if path.endswith("/save_weights_for_sampler"):
        return str(json.loads(body)["seq_id"])
    return hashlib.sha256(body).hexdigest()


@pytest.fixture
def network(service: Service) -> Iterator[BadNetwork]:
    bad = BadNetwork(service.base_url)
    yield bad
    bad.close()


def _script(client: tinker.ServiceClient) -> list[list[list[float]]]:
    """Train, with a sampler made and used on the way: what each of them, and the run at last, gives the data."""
    run = client.create_lora_training_client(base_model=MODEL, rank=8, seed=4).result(60)
    scores = []
    for step in range(1, STEPS + 1):
        forward = run.forward_backward(DATA, "cross_entropy")
        taken = run.optim_step(types.AdamParams(learning_rate=1e-3, eps=1e-8))
        forward.result(60)
        taken.result(60)
        if step % SAVE_EVERY == 0:
            sampler = run.save_weights_and_get_sampling_client().result(60)
            scores.append([sampler.compute_logprobs(datum.model_input) for datum in DATA])
    final = logprobs(run, DATA)
    return [*([score.result(60)[1:] for score in scored] for scored in scores), final]  # type: ignore[list-item]


def test_nothing_is_trained_twice_through_a_bad_network(
    network: BadNetwork, connect: Callable[..., tinker.ServiceClient]
) -> None:
    quiet = _script(connect())
    disturbed = _script(tinker.ServiceClient(base_url=network.url, api_key="tml-bad-network"))
    for expected, got in zip(quiet, disturbed, strict=True):
        assert largest_gap(expected, got) < 1e-3

    routes = Counter(path.rpartition("/")[2] for path, _ in network.answers)
    saves = STEPS // SAVE_EVERY
    assert routes["forward_backward"] == STEPS + 1 and routes["optim_step"] == STEPS
    assert routes["save_weights_for_sampler"] == saves and routes["asample"] == saves * len(DATA)
    assert network.faults["502"] == routes.total()
    assert network.faults["dropped"] >= 5 and network.faults["repeated"] >= 20
    assert [route for route, bodies in network.answers.items() if len(bodies) > 1] == []
