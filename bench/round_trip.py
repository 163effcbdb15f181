"""What the queue costs: `python -m bench.round_trip [--steps 400]`.

1. An empty `optim_step` (nothing to apply) through the SDK against a whole service: submit, log, doorbell, claim,
   commit, notice, result. Beside it, alternating, two plain requests of the same SDK (`get_training_run` twice), since
   a round trip is two requests: the ratio is what log and queue add to HTTP.
2. The submit handlers alone, without transfer: the application is called as ASGI with the whole body at hand, and the
   clock stops when its answer begins. `forward_backward` of 4 KiB, 64 KiB and 5 MB (zstd, as the SDK sends them), and
   `optim_step`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TINKER_TELEMETRY", "0")

import numpy as np
import zstandard

from app.migrate import upgrade
from app.up.network import answers_ping, free_port
from app.up.redis_server import find_redis_server, redis_command
from app.wire import tinker_pb2 as pb
from tests import factories
from tests.e2e.service import Service

KEY = "tml-bench"
WARM_UP = 20


def through_the_sdk(base_url: str, steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of empty optimizer steps, and of two plain requests, in turns."""
    import tinker
    from tinker import types

    service = tinker.ServiceClient(base_url=base_url, api_key=KEY)
    training = service.create_lora_training_client(base_model="tiny", rank=8).result()
    rest, model_id = tinker.RestClient(base_url=base_url, api_key=KEY), training.model_id
    step, plain = [], []
    for _ in range(steps + WARM_UP):
        start = time.perf_counter()
        training.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        step.append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        rest.get_training_run(model_id).result()
        rest.get_training_run(model_id).result()
        plain.append((time.perf_counter() - start) * 1e3)
    return step[WARM_UP:], plain[WARM_UP:]


def batch(model_id: str, seq_id: int, size: int, rng: np.random.Generator) -> bytes:
    """A `forward_backward` whose protobuf form has about `size` bytes, zstd-compressed."""
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    while message.ByteSize() < size:
        n = min(512, max(8, (size - message.ByteSize()) // 16))
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = rng.integers(0, 1000, n).astype("<i4").tobytes()
        for name, values, dtype in (
            ("target_tokens", rng.integers(0, 1000, n).astype("<i8"), pb.DTYPE_INT64),
            ("weights", rng.random(n).astype("<f4"), pb.DTYPE_FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.tobytes(), dtype
    return zstandard.compress(message.SerializeToString())


async def ask(app: Any, path: str, body: bytes, content_type: str, encoding: str = "") -> tuple[float, dict[str, Any]]:
    """Milliseconds until the answer begins, and the answer."""
    headers = [(b"x-api-key", KEY.encode()), (b"content-type", content_type.encode())]
    headers += [(b"content-length", str(len(body)).encode()), (b"content-encoding", encoding.encode())]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    scope |= {"path": f"/api/v1/{path}", "raw_path": f"/api/v1/{path}".encode(), "root_path": "", "query_string": b""}
    scope |= {"headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80)}
    parts: list[bytes] = []
    begun = 0.0
    status = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal begun, status
        if message["type"] == "http.response.start":
            begun, status = time.perf_counter(), message["status"]
        else:
            parts.append(message.get("body", b""))

    start = time.perf_counter()
    await app(scope, receive, send)
    answer = json.loads(b"".join(parts))
    assert status == 200, answer
    return (begun - start) * 1e3, answer


async def handlers(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each submit handler, one request at a time."""
    from app.main import create_app

    app = create_app()
    with app.state.services.database.write() as session:
        factories.add_model(session)
        factories.add_worker(session)
    rng = np.random.default_rng(0)
    taken: dict[str, list[float]] = {}
    async with app.router.lifespan_context(app):
        _, created = await ask(app, "create_session", b'{"tags": []}', "application/json")
        run = {"session_id": created["session_id"], "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        _, future = await ask(app, "create_model", json.dumps(run).encode(), "application/json")
        sizes = (("4 KiB", 4 << 10), ("64 KiB", 64 << 10), ("5 MB", 5_000_000))
        bodies = [
            (f"forward_backward of {name}", batch(future["model_id"], 3 * i + j + 1, size, rng))
            for i in range(rounds)
            for j, (name, size) in enumerate(sizes)
        ]
        for name, body in sorted(bodies, key=lambda named: named[0]):
            ms, _ = await ask(app, "forward_backward", body, "application/x-protobuf", "zstd")
            taken.setdefault(name, []).append(ms)
        for seq_id in range(len(bodies) + 1, len(bodies) + 1 + 4 * rounds):
            step = {"model_id": future["model_id"], "seq_id": seq_id, "adam_params": {"learning_rate": 1e-3}}
            ms, _ = await ask(app, "optim_step", json.dumps(step).encode(), "application/json")
            taken.setdefault("optim_step", []).append(ms)
    return taken


def report(name: str, ms: Sequence[float]) -> float:
    """Print a line; returns the p50."""
    p50, p90 = np.percentile(ms, [50, 90])
    print(f"{name:40s} {len(ms):5d} times  p50 {p50:6.2f} ms  p90 {p90:6.2f} ms", flush=True)
    return float(p50)


def main() -> None:
    """Both measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        service = Service(Path(folder) / "data")
        service.start()
        step, plain = through_the_sdk(service.base_url, args.steps)
        service.stop()
    trip, two = report("empty optim_step through the SDK", step), report("two get_training_run through the SDK", plain)
    print(f"{'round trip over two plain requests':40s} {trip / two:.2f}")
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        command = redis_command(find_redis_server(), port=port, folder=Path(folder))
        redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            os.environ |= {
                "DATABASE_URL": f"sqlite:///{folder}/tinworks.db",
                "REDIS_URL": f"redis://127.0.0.1:{port}/0",
                "TINWORKS_DATA_DIR": folder,
                "TINWORKS_AUTH": "open",
                "TINWORKS_LOG_LEVEL": "error",
            }
            upgrade(os.environ["DATABASE_URL"])
            while not answers_ping(port):
                time.sleep(0.05)
            for name, ms in asyncio.run(handlers(args.rounds)).items():
                report(name, ms)
        finally:
            redis.terminate()
            redis.wait(10)
    os._exit(0)


if __name__ == "__main__":
    main()
