"""The HTTP service in this process, on a real database and a real Redis, with two tenants and a served model."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from starlette.testclient import TestClient
from tinker.proto import tinker_public_pb2 as sdk

from app.accounts.service import create_key
from app.db import Database, get_database
from app.futures import waiters
from app.main import create_app
from app.runs import log
from app.runs.log import Failure, Finished, Payload
from app.runs.models import Operation, Run
from app.sampling import service as sampling
from tests import factories

if TYPE_CHECKING:
    from tests.unit.workers.train.train_lab import Lab

PROTOBUF = "application/x-protobuf"


@dataclass
class Api:
    """The service as clients see it, and its database as workers do. `alice` asks unless somebody else is named."""

    client: TestClient
    database: Database
    keys: dict[str, str]

    def get(self, path: str, *, who: str = "alice") -> httpx.Response:
        return self.client.get(path, headers={"x-api-key": self.keys[who]})

    def send(self, method: str, path: str, body: object = None, *, who: str = "alice") -> httpx.Response:
        """A request of any method, with a JSON body or none."""
        return self.client.request(method, f"/api/v1/{path}", json=body, headers={"x-api-key": self.keys[who]})

    def seen(self, path: str, *, who: str = "alice") -> dict[str, Any]:
        """The JSON answer of a GET that must succeed."""
        answer = self.send("GET", path, who=who)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def post(self, path: str, body: object = None, *, who: str = "alice", **headers: str) -> httpx.Response:
        """POST a body: bytes as they are, anything else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"x-api-key": self.keys[who], "content-type": "application/json"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.client.post(f"/api/v1/{path}", content=content, headers=sent)

    def ok(self, path: str, body: object = None, *, who: str = "alice", **headers: str) -> dict[str, Any]:
        """The JSON answer of a request that must succeed."""
        answer = self.post(path, body, who=who, **headers)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def session(self, who: str = "alice") -> str:
        return str(self.ok("create_session", {"tags": []}, who=who)["session_id"])

    def create(self, session_id: str, number: int = 0, *, who: str = "alice", **fields: object) -> dict[str, Any]:
        body = {
            "session_id": session_id,
            "model_seq_id": number,
            "base_model": "tiny",
            "lora_config": {"rank": 4},
            "type": "create_model",
        }
        return self.ok("create_model", body | fields, who=who)

    def run(self, who: str = "alice") -> str:
        """A run whose creation a worker has finished."""
        model_id = str(self.create(self.session(who), who=who)["model_id"])
        self.finish(model_id, 0, result=b'{"type":"create_model"}')
        return model_id

    def forward_backward(self, body: bytes, **options: str) -> httpx.Response:
        return self.post("forward_backward", body, **{"content_type": PROTOBUF} | options)

    def poll(self, request_id: str, *, who: str = "alice") -> httpx.Response:
        body = {"request_id": request_id, "allow_metadata_only": False}
        return self.post("retrieve_future", body, who=who, accept=PROTOBUF)

    def operation(self, model_id: str, seq_id: int) -> Operation:
        with self.database.read() as session:
            found = log.find(session, model_id, seq_id)
        assert found is not None, f"there is no operation {seq_id}"
        return found

    def finish(
        self, model_id: str, seq_id: int, *, result: bytes = b"{}", kind: str = "json", failure: Failure | None = None
    ) -> None:
        """What a worker's commit does to an operation."""
        payload = None if failure else Payload(result, None, len(result))
        with self.database.write() as session:
            log.finish(session, [Finished(model_id, seq_id, payload, kind, failure)])
            session.get_one(Run, model_id).applied_seq = seq_id


@contextmanager
def running(
    configure: Callable[..., None],
    database_url: str,
    redis_url: str,
    data_dir: Path,
    *,
    sweep_s: float = 0.05,
    **settings: object,
) -> Iterator[Api]:
    """The service, with some of its settings changed. It looks into its stores often, so that no test waits for it."""
    values = {"data_dir": data_dir, "poll_hold_s": 0.2, "key_cache_s": 0, "log_level": "error"} | settings
    environment = {f"TINWORKS_{name.upper()}": value for name, value in values.items()}
    configure(DATABASE_URL=database_url, REDIS_URL=redis_url, **environment)
    keys = {name: create_key(name)[1] for name in ("alice", "bob")}
    with get_database().write() as session:
        factories.add_model(session)
        factories.add_worker(session)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiters, "SWEEP_S", sweep_s)
        patch.setattr(sampling, "_TRUST_S", 0.0)
        with TestClient(create_app(), raise_server_exceptions=False) as client:
            yield Api(client, get_database(), keys)


@pytest.fixture
def api(configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path) -> Iterator[Api]:
    """The service on SQLite."""
    with running(configure, sqlite_url, redis_url, tmp_path) as service:
        yield service


@pytest.fixture
def each_api(configure: Callable[..., None], database_url: str, redis_url: str, tmp_path: Path) -> Iterator[Api]:
    """The service on SQLite and on Postgres."""
    with running(configure, database_url, redis_url, tmp_path) as service:
        yield service


@pytest.fixture
def batch() -> Callable[..., bytes]:
    """Makes a `forward_backward` body of one datum, in the SDK's own classes."""

    def make(model_id: str, seq_id: int, *tokens: int, **fields: object) -> bytes:
        request = sdk.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy", **fields)
        datum = request.data.add()
        values = np.array(tokens or (1, 2, 3))
        datum.model_input.add().encoded_text.tokens = values.astype(np.int32).tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense, targets.dtype = values.astype(np.int64).tobytes(), sdk.DTYPE_INT64
        return bytes(request.SerializeToString())

    return make


@pytest.fixture
def idempotency_key() -> str:
    """A key as the SDK makes it."""
    return f"stainless-python-retry-{uuid.uuid4()}"


@pytest.fixture
def lab(sqlite_url: str, tmp_path: Path) -> Iterator[Lab]:
    """Train loops turned by hand, on SQLite."""
    from tests.unit.workers.train.train_lab import Lab  # torch, for those who need it

    database = Database(sqlite_url)
    made = Lab(database, tmp_path)
    yield made
    made.close()
    database.dispose()


@pytest.fixture
def each_lab(database: Database, tmp_path: Path) -> Iterator[Lab]:
    """Train loops turned by hand, on both databases."""
    from tests.unit.workers.train.train_lab import Lab

    made = Lab(database, tmp_path)
    yield made
    made.close()
