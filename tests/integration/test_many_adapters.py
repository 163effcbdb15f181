"""A sampler with few places and many adapters: every request gets its own, and none waits for another's load."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import redis
import torch

from app.checkpoints.models import Snapshot
from app.sampling.keys import claim_key
from app.sampling.models import SamplingSession
from app.settings import Settings
from app.wire import tinker_pb2 as pb
from app.wire.types import LoraConfig
from tests.factories import POOL
from tests.integration.conftest import Api
from tests.services import wait_for
from tests.unit.workers.sample.adapter_lab import PLENTY, HeldBlobs
from tests.unit.workers.train.train_lab import tiny_base
from workers.model.lora import Adapter
from workers.sample.adapter_files import AdapterFiles
from workers.sample.adapters import AdapterStore
from workers.sample.engines.native import NativeEngine
from workers.sample.service import SampleService
from workers.snapshot_folders import SnapshotFolders
from workers.train import snapshots

PROMPT = [3, 14, 15, 9]
CLAIM_S = 0.6


class World:
    """A sampler with four places for adapters, a client with a sampling session of each adapter."""

    def __init__(self, api: Api, server: redis.Redis, folder: Path) -> None:
        self.api = api
        self.server = server
        self.base = tiny_base()
        self.blobs = HeldBlobs(folder / "held")
        engine = NativeEngine(self.base, eos=())
        files = AdapterFiles(SnapshotFolders(folder / "adapters", budget_bytes=PLENTY), self.blobs)
        self.store = AdapterStore(engine, files, capacity=4)
        none = SimpleNamespace(start=lambda: None, stop=lambda timeout_s: None, counted=lambda stored, deliver: deliver)
        parts: dict[str, Any] = {"usage": none, "recorder": none, "adapters": self.store}
        settings = Settings(sample_claim_s=CLAIM_S)
        self.service = SampleService(worker_id="w1", pool=POOL, engine=engine, redis=server, settings=settings, **parts)
        self._session_id = api.session()
        self._model_id = api.run()
        self._samplers: dict[str | None, str] = {}

    def adapter(self, seed: int) -> tuple[str, Adapter]:
        """A snapshot of random weights, large enough to change what is sampled."""
        adapter = self.base.new_adapter(LoraConfig(rank=2, seed=seed))
        adapter.flat.normal_(0, 0.15, generator=torch.Generator().manual_seed(seed))
        files = snapshots.adapter_files(adapter, self.base)
        snapshots.write(self.blobs, files)
        return files.id, adapter

    def ask(self, snapshot_id: str | None, seq_id: int, *, max_tokens: int = 3) -> str:
        """A greedy sample, which the sampler knows of."""
        sampler = self._samplers.get(snapshot_id) or self._sampler(snapshot_id)
        body = {
            "sampling_session_id": sampler,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"tokens": PROMPT}]},
            "sampling_params": {"max_tokens": max_tokens, "temperature": 0.0},
        }
        request_id = str(self.api.ok("asample", body)["request_id"])
        self.service.take([request_id])
        return request_id

    def _sampler(self, snapshot_id: str | None) -> str:
        number = len(self._samplers)
        body = {"session_id": self._session_id, "sampling_session_seq_id": number, "base_model": "tiny"}
        identity = str(self.api.ok("create_sampling_session", body)["sampling_session_id"])
        with self.api.database.write() as session:
            row = session.get_one(SamplingSession, identity)
            row.snapshot_id = snapshot_id
            if snapshot_id is not None:
                facts = {"model_id": self._model_id, "seq_id": 0, "kind": "adapter", "size_bytes": 1}
                session.add(Snapshot(id=snapshot_id, owner_id=row.owner_id, **facts))
        self._samplers[snapshot_id] = identity
        return identity

    def answer(self, request_id: str) -> tuple[list[int], list[float]]:
        """Tokens and logprobs of a sample that must succeed."""
        wait_for(lambda: self.api.poll(request_id).status_code != 408)
        found = self.api.poll(request_id)
        assert found.status_code == 200 and not found.content.startswith(b"{"), found.text
        response = pb.SampleResponse()
        response.ParseFromString(found.content)
        (sequence,) = response.sequences
        return np.frombuffer(sequence.tokens, "<i4").tolist(), np.frombuffer(sequence.logprobs, "<f4").tolist()

    def error(self, request_id: str) -> tuple[str, str]:
        """Why a sample has failed."""
        wait_for(lambda: self.api.poll(request_id).status_code != 408)
        found = orjson.loads(self.api.poll(request_id).content)
        return found["category"], found["error"]

    @torch.no_grad()
    def expected(self, adapter: Adapter, count: int = 3) -> tuple[list[int], list[float]]:
        """What a model that has the adapter merged into its weights continues with."""
        merged = copy.deepcopy(self.base.model)
        merged.lm_head.weight = torch.nn.Parameter(merged.lm_head.weight.detach().clone())  # else the embedding's
        for path, (a, b) in adapter.modules.items():
            merged.get_submodule(path).weight.data += adapter.scale * b.detach() @ a.detach()
        tokens, logprobs = list(PROMPT), []
        for _ in range(count):
            logits = merged(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
            best = torch.log_softmax(logits.double(), -1).max(-1)
            tokens.append(int(best.indices))
            logprobs.append(float(best.values))
        return tokens[len(PROMPT) :], logprobs


@pytest.fixture
def world(api: Api, redis_url: str, tmp_path: Path) -> Iterator[World]:
    with redis.Redis.from_url(redis_url) as server:
        made = World(api, server, tmp_path)
        made.service.start()
        yield made
        made.service.stop(10)


def test_a_hundred_adapters_take_turns_in_four_places(world: World) -> None:
    adapters = [world.adapter(seed) for seed in range(100)]
    asked = [world.ask(snapshot_id, turn) for turn in range(2) for snapshot_id, _ in adapters]
    answers = [world.answer(request_id) for request_id in asked]
    for i, (_, adapter) in enumerate(adapters):
        tokens, logprobs = world.expected(adapter)
        for got_tokens, got_logprobs in (answers[i], answers[i + 100]):
            assert got_tokens == tokens
            np.testing.assert_allclose(got_logprobs, logprobs, atol=1e-4)
    assert len({tuple(np.round(logprobs, 3)) for _, logprobs in answers}) == 100


def test_requests_go_on_while_an_adapter_is_being_fetched(world: World) -> None:
    slow, slow_adapter = world.adapter(1)
    quick, quick_adapter = world.adapter(2)
    held = world.blobs.hold(slow)
    running = world.ask(quick, 0, max_tokens=20)
    late = world.ask(slow, 0)
    wait_for(lambda: slow in world.blobs.asked)
    base = world.ask(None, 0)
    assert world.answer(running)[0] == world.expected(quick_adapter, 20)[0]
    assert world.answer(base)[0]
    again = world.ask(quick, 1)
    assert world.answer(again)[0] == world.expected(quick_adapter)[0]
    assert world.api.poll(late).status_code == 408
    held.set()
    assert world.answer(late)[0] == world.expected(slow_adapter)[0]


def test_a_claim_is_renewed_while_its_adapter_is_being_fetched(world: World) -> None:
    slow, _ = world.adapter(1)
    held = world.blobs.hold(slow)
    late = world.ask(slow, 0)
    wait_for(lambda: slow in world.blobs.asked)
    seen: set[int] = set()

    def renewed() -> bool:
        """Whether the claim's time has grown, twice."""
        left = world.server.pttl(claim_key(late))
        assert left > 0, "the claim was lost"
        grown = bool(seen) and left > min(seen)
        if grown:
            seen.clear()
            grows.append(left)
        seen.add(left)
        return len(grows) >= 2

    grows: list[int] = []
    wait_for(renewed)
    held.set()
    world.answer(late)


def test_a_request_is_cancelled_while_its_adapter_is_being_fetched(world: World) -> None:
    slow, _ = world.adapter(1)
    held = world.blobs.hold(slow)
    late = world.ask(slow, 0)
    wait_for(lambda: slow in world.blobs.asked)
    assert world.api.post("cancel_future", {"request_id": late}).status_code == 204
    assert "cancelled" in world.error(late)[1]
    wait_for(lambda: late not in world.service._running)
    held.set()


def test_a_sampler_that_stops_gives_back_what_waits_for_an_adapter(world: World) -> None:
    slow, _ = world.adapter(1)
    held = world.blobs.hold(slow)
    late = world.ask(slow, 0)
    wait_for(lambda: slow in world.blobs.asked)
    world.service.stop(5)
    assert not world.server.exists(claim_key(late))
    assert world.api.poll(late).status_code == 408
    held.set()


def test_a_snapshot_that_is_damaged_fails_its_own_requests_only(world: World) -> None:
    bad, _ = world.adapter(1)
    good, adapter = world.adapter(2)
    world.blobs.put(f"snapshots/{bad}/adapter_model.safetensors", b"?")
    failed, fine = world.ask(bad, 0), world.ask(good, 0)
    assert world.answer(fine)[0] == world.expected(adapter)[0]
    category, text = world.error(failed)
    assert category == "user" and "damaged" in text
