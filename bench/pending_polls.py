"""What waiting costs: heartbeats beside thousands of pending polls: `python -m bench.pending_polls [--polls 2048]`.

One API process on SQLite and a Redis of its own; no worker, so nothing ever ends. Baseline in the same run: the same
heartbeats with no poll waiting. Then the polls, half of them for training and half for samples, are held, answered 408
after `--hold` seconds and sent again, all at the same moments, for `--seconds`. Prints heartbeat latencies and the
most database connections that were checked out at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import uvicorn

from app.db import Database
from app.migrate import upgrade
from app.up.network import answers_ping, free_port
from app.up.redis_server import find_redis_server, redis_command
from tests import factories

KEY = "tml-bench"
BEAT_EVERY_S = 0.02


@dataclass
class Client:
    """Requests over connections that are kept open, one per caller."""

    port: int
    streams: dict[object, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(default_factory=dict)

    async def post(self, who: object, path: str, body: object) -> tuple[int, bytes]:
        """Status and body of the answer."""
        if who not in self.streams:
            self.streams[who] = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams[who]
        content = json.dumps(body).encode()
        head = f"POST /api/v1/{path} HTTP/1.1\r\nhost: bench\r\nx-api-key: {KEY}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
        status = int((await reader.readline()).split()[1])
        length = 0
        while (line := await reader.readline()) != b"\r\n":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        return status, await reader.readexactly(length)

    async def ok(self, path: str, body: object) -> dict[str, object]:
        """The answer of a request that must succeed."""
        status, content = await self.post(None, path, body)
        assert status == 200, content
        answer: dict[str, object] = json.loads(content)
        return answer


async def beat(client: Client, session_id: object, seconds: float) -> list[float]:
    """Milliseconds of heartbeats, one every 20 ms."""
    taken = []
    deadline = time.perf_counter() + seconds
    while (start := time.perf_counter()) < deadline:
        status, _ = await client.post("beat", "session_heartbeat", {"session_id": session_id})
        assert status == 200
        taken.append((time.perf_counter() - start) * 1e3)
        await asyncio.sleep(BEAT_EVERY_S)
    return taken


async def poll(client: Client, request_id: str, answered: list[int]) -> None:
    """One future's polls, for ever."""
    while True:
        status, _ = await client.post(request_id, "retrieve_future", {"request_id": request_id})
        assert status == 408, status
        answered.append(1)


async def load(port: int, polls: int, seconds: float) -> None:
    """The clients' side, in a process of its own."""
    client = Client(port)
    session_id = (await client.ok("create_session", {"tags": []}))["session_id"]
    run = {"session_id": session_id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
    model_id = (await client.ok("create_model", run))["model_id"]
    sampling = {"session_id": session_id, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = (await client.ok("create_sampling_session", sampling))["sampling_session_id"]
    request_ids = []
    for number in range(polls // 2):
        step = {"model_id": model_id, "seq_id": number + 1, "adam_params": {"learning_rate": 1e-3}}
        request_ids.append(str((await client.ok("optim_step", step))["request_id"]))
        sample = {"sampling_session_id": sampler, "seq_id": number, "prompt": {"chunks": [{"tokens": [1, 2]}]}}
        request_ids.append(str((await client.ok("asample", sample))["request_id"]))
    alone = await beat(client, session_id, seconds / 2)
    answered: list[int] = []
    tasks = [asyncio.create_task(poll(client, request_id, answered)) for request_id in request_ids]
    beside = await beat(client, session_id, seconds)
    broken = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    print(json.dumps({"alone": alone, "beside": beside, "answered": len(answered), "broken": broken}))


async def serve(port: int, arguments: list[str]) -> tuple[dict[str, list[float]], int]:
    """Run the service here and the clients in another process; their figures, and the most connections in use."""
    from app.main import create_app

    app = create_app()
    database: Database = app.state.services.database
    with database.write() as session:
        factories.add_model(session)
        factories.add_worker(session)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", access_log=False, backlog=4096))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    command = [sys.executable, "-m", "bench.pending_polls", "--clients-of", str(port), *arguments]
    clients = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    most = 0
    reading = asyncio.create_task(clients.communicate())
    while not reading.done():
        most = max(most, database.engine.pool.checkedout())  # type: ignore[attr-defined]
        await asyncio.sleep(0.001)
    server.should_exit = True
    await serving
    return json.loads(reading.result()[0]), most


def report(name: str, taken: list[float]) -> float:
    """Print a line; returns the p99."""
    p50, p99 = np.percentile(taken, [50, 99])
    print(f"{name:45s} {len(taken):6d} heartbeats  p50 {p50:6.1f} ms  p99 {p99:6.1f} ms  max {max(taken):6.1f} ms")
    return float(p99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--polls", type=int, default=2048)
    parser.add_argument("--hold", type=float, default=25.0, help="seconds that a poll is held")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients-of", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if args.clients_of:
        asyncio.run(load(args.clients_of, args.polls, args.seconds))
        return
    with tempfile.TemporaryDirectory() as folder:
        redis_port, port = free_port(), free_port()
        command = redis_command(find_redis_server(), port=redis_port, folder=Path(folder))
        redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            os.environ |= {
                "DATABASE_URL": f"sqlite:///{folder}/tinworks.db",
                "REDIS_URL": f"redis://127.0.0.1:{redis_port}/0",
                "TINWORKS_DATA_DIR": folder,
                "TINWORKS_AUTH": "open",
                "TINWORKS_LOG_LEVEL": "error",
                "TINWORKS_POLL_HOLD_S": str(args.hold),
            }
            upgrade(os.environ["DATABASE_URL"])
            while not answers_ping(redis_port):
                time.sleep(0.05)
            figures, most = asyncio.run(serve(port, ["--polls", str(args.polls), "--seconds", str(args.seconds)]))
        finally:
            redis.terminate()
            with suppress(subprocess.TimeoutExpired):
                redis.wait(10)
    alone = report("no poll pending", figures["alone"])
    beside = report(f"{args.polls} polls pending", figures["beside"])
    print(f"{'polls answered 408, and broken':45s} {figures['answered']:6} {figures['broken']}")
    print(f"{'database connections in use, at most':45s} {most:6d}")
    print(f"{'p99, pending over none':45s} {beside / alone:6.2f}")


if __name__ == "__main__":
    main()
