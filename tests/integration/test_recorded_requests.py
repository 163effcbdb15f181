"""What SDKs of all ages send, request by request as in `tests/data/recorded`, is answered as the protocol says.

A file holds a request (`body`: JSON; `base64`: protobuf) and what its answer must be: `status`, `keys` that must be
there, `json` values, the `content_type`. `operation` is the place in the log that a training request takes; with an
`error` it has failed there. `settings` are those of a service that answers so.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import redis
from sqlalchemy import update

from app.checkpoints.service import snapshot_folder
from app.custom_losses.models import CustomLoss
from app.runs.log import Failure
from app.runs.models import Run
from app.sampling.store import SampleAnswer, SampleDesk
from app.sessions.models import ClientSession
from app.storage.blobs import get_blob_store
from app.wire.sampling import encode_result
from app.wire.training import encode_output
from app.wire.types import ForwardBackwardOutput, SampledSequence, SampleResult
from tests.factories import POOL, add_checkpoint, add_operation
from tests.integration.conftest import Api, running

RECORDED = {path.stem: path for path in sorted((Path(__file__).parents[1] / "data" / "recorded").glob("*.json"))}
SESSION, RUN, SAMPLER = "recorded", "recorded:train:0", "recorded:sample:0"
LOSS = "0123456789abcdef" * 2
LARGE_BYTES = 1024


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED[name].read_text())
    return found


@pytest.fixture
def scene(
    request: pytest.FixtureRequest,
    configure: Callable[..., None],
    sqlite_url: str,
    redis_url: str,
    tmp_path: Path,
) -> Iterator[Api]:
    """A service in which all has happened that the recorded requests speak of."""
    settings = {"metadata_first_bytes": LARGE_BYTES, "sample_use_retrieve_futures": True}
    settings |= read(request.getfixturevalue("name")).get("settings", {})
    with running(configure, sqlite_url, redis_url, tmp_path, **settings) as api:
        train(api)
        sample(api, redis_url)
        api.ok("create_custom_loss", read("create_custom_loss")["body"] | {"custom_loss_seq_id": 0})
        with api.database.write() as session:
            session.execute(update(CustomLoss).values(id=LOSS))
        yield api


def train(api: Api) -> None:
    """A run with checkpoints of all kinds, a result, a failure, a large result and a pass that waits."""
    first = api.session()
    with api.database.write() as session:
        owner_id = session.get_one(ClientSession, first).owner_id
        session.add(ClientSession(id=SESSION, owner_id=owner_id))
    assert api.create(SESSION)["model_id"] == RUN
    with api.database.write() as session:
        run = session.get_one(Run, RUN)
        for seq_id in (1, 2, 3, 4):
            add_operation(session, RUN, seq_id)
        for kind in ("weights", "sampler_weights", "external_weights"):
            snapshot_id = add_checkpoint(session, run, kind=kind).snapshot_id
            folder, files = snapshot_folder(snapshot_id), {"adapter_config.json": {"size": 2}}
            get_blob_store().put(f"{folder}/adapter_config.json", b"{}")
            get_blob_store().put(f"{folder}/manifest.json", json.dumps(files).encode())
    api.finish(RUN, 0, result=json.dumps({"type": "create_model", "model_id": RUN}).encode())
    for seq_id, length in ((1, 3), (3, LARGE_BYTES)):
        output = ForwardBackwardOutput([{"logprobs": np.zeros(length, np.float32)}], {"loss:sum": 0.0})
        api.finish(RUN, seq_id, kind="proto", result=encode_output(output))
    api.finish(RUN, 2, failure=Failure("data: must hold at least one datum", "user"))


def sample(api: Api, redis_url: str) -> None:
    """A sampler with a sample that is finished and one that waits."""
    body: dict[str, Any] = {"session_id": SESSION, "sampling_session_seq_id": 0, "base_model": "tiny"}
    assert api.ok("create_sampling_session", body)["sampling_session_id"] == SAMPLER
    body = {"sampling_session_id": SAMPLER, "prompt": {"chunks": [{"tokens": [1]}]}}
    sequence = SampledSequence("stop", np.array([2], np.int32), np.array([-1], np.float32))
    with redis.Redis.from_url(redis_url) as client:
        desk = SampleDesk(client, pool=POOL, worker_id="w", claim_s=60, result_ttl_s=900)
        request_id = api.ok("asample", body | {"seq_id": 0})["request_id"]
        desk.finish([(request_id, SampleAnswer("proto", encode_result(SampleResult([sequence]))))])
    api.ok("asample", body | {"seq_id": 1})


def replay(api: Api, recorded: dict[str, Any]) -> httpx.Response:
    headers = {"x-api-key": api.keys["alice"], "accept": "application/json"}
    content = None
    if "body" in recorded:
        content, headers["content-type"] = json.dumps(recorded["body"]).encode(), "application/json"
    elif "base64" in recorded:
        content = base64.b64decode(recorded["base64"])
    return api.client.request(
        recorded["method"],
        f"/api/v1/{recorded['path']}",
        params=recorded.get("query"),
        content=content,
        headers=headers | recorded.get("headers", {}),
        follow_redirects=False,
    )


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_request_is_answered_as_documented(scene: Api, name: str) -> None:
    recorded = read(name)
    answer = replay(scene, recorded)
    assert answer.status_code == recorded["status"], answer.text
    if "content_type" in recorded:
        assert answer.headers["content-type"] == recorded["content_type"]
        return
    told = answer.json() if answer.content else {}
    assert set(recorded.get("keys", ())) <= told.keys()
    assert recorded.get("json", {}).items() <= told.items()
    if "operation" in recorded:
        place = recorded["operation"]
        row = scene.operation(place.get("model_id", RUN), place["seq_id"])
        assert place.get("error", "") in (row.error or ""), row.error
        assert row.state == ("failed" if "error" in place else "accepted"), row.error


def test_every_route_of_the_protocol_is_recorded(api: Api) -> None:
    asked = {(each["method"].lower(), f"/api/v1/{each['path']}") for each in map(read, RECORDED)}
    unasked = set()
    for path, methods in api.client.app.openapi()["paths"].items():  # type: ignore[attr-defined]
        pattern = re.sub(r"\{\w+\}", ".+", path)
        if path.startswith("/api/v1"):
            unasked |= {(m, path) for m in methods if not any(m == n and re.fullmatch(pattern, p) for n, p in asked)}
    assert unasked <= NO_REQUESTS_OF_THE_SDK


NO_REQUESTS_OF_THE_SDK = {("get", f"/api/v1/{signed}/{{token}}/{{filename}}") for signed in ("downloads", "traces")}
"""What links lead to that we have signed."""
