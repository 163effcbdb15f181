"""The external engine against a small server that answers as vLLM's does, from a model that can be predicted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from app.errors import InvalidRequest
from app.wire.types import LoraConfig, PromptTargets, SampleRequest, SampleResult
from tests.engine_suite.rig import Outcomes, ask
from tests.services import wait_for
from workers.model.base import BaseModel
from workers.model.export import peft_files
from workers.model.tiny import make_tiny_model
from workers.sample.engines.base import Cancelled, EngineFailure
from workers.sample.engines.external import ExternalAdapter, ExternalEngine, ExternalOptions
from workers.snapshot_files import BadSnapshot

LOGPROB = -0.5


class FakeServer(httpx.AsyncBaseTransport):
    """Continues a prompt with the numbers after its last token; each token has k more probable neighbours."""

    def __init__(self) -> None:
        self.completions: list[dict[str, Any]] = []
        self.adapters: set[str] = set()
        self.answer: Callable[[dict[str, Any]], httpx.Response] | None = None
        self.held = threading.Event()
        self.held.set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        route, body = request.url.path, json.loads(request.content or b"{}")
        if route == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "base", "max_model_len": 100}]})
        if route == "/v1/load_lora_adapter":
            assert body["is_3d_lora_weight"]
            if "broken" in body["lora_name"]:
                return httpx.Response(400, json={"error": {"message": "no such rank"}})
            self.adapters.add(body["lora_name"])
            return httpx.Response(200, text="ok")
        if route == "/v1/unload_lora_adapter":
            self.adapters.remove(body["lora_name"])
            return httpx.Response(200, text="ok")
        assert route == "/v1/completions"
        self.completions.append(body)
        while not self.held.is_set():
            await asyncio.sleep(0.005)
        return self.answer(body) if self.answer else httpx.Response(200, json=self._complete(body))

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = [body["prompt"][-1] + 1 + i for i in range(body["max_tokens"])]
        reason = "length"
        for end, token in enumerate(tokens):
            if token in body["stop_token_ids"]:
                tokens, reason = tokens[: end + 1], "stop"
                break

        def told(token: int, k: int) -> dict[int, float]:
            return {token: LOGPROB, **{token + 500 + i: LOGPROB + 0.1 * (k - i) for i in range(k)}}

        prompt_logprobs = None
        if (k := body.get("prompt_logprobs")) is not None:
            prompt_logprobs = [
                None,
                *({str(t): {"logprob": p} for t, p in told(token, k).items()} for token in body["prompt"][1:]),
            ]
        choice = {
            "token_ids": tokens,
            "finish_reason": reason,
            "prompt_logprobs": prompt_logprobs,
            "logprobs": {
                "token_logprobs": [LOGPROB] * len(tokens),
                "top_logprobs": [
                    {f"token_id:{t}": p for t, p in told(token, body["logprobs"]).items()} for token in tokens
                ],
            },
        }
        usage = {"prompt_tokens_details": {"cached_tokens": 3}}
        return {"choices": [choice], "usage": usage}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(made)
    return made


@pytest.fixture(scope="module")
def outline(folder: Path) -> BaseModel:
    return BaseModel.outline(folder, dtype=torch.float32)


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def engine(outline: BaseModel, server: FakeServer) -> Iterator[ExternalEngine]:
    def decode(tokens: object) -> str:
        return "".join(f"<{token}>" for token in tokens)  # type: ignore[attr-defined]

    made = ExternalEngine(outline, ExternalOptions("http://there", transport=server), decode=decode)
    yield made
    made.close()


def outcome(
    engine: ExternalEngine, request: SampleRequest, adapter: ExternalAdapter | None = None
) -> SampleResult | Exception:
    outcomes = Outcomes()
    engine.submit(outcomes.job(request, adapter))
    wait_for(lambda: engine.step() or outcomes)
    wait_for(lambda: engine.step() or len(outcomes) == 1)
    return outcomes[request.request_id]


def result(engine: ExternalEngine, request: SampleRequest, adapter: ExternalAdapter | None = None) -> SampleResult:
    got = outcome(engine, request, adapter)
    if isinstance(got, Exception):
        raise got
    return got


def written(base: BaseModel, folder: Path, *, unembed: bool) -> Path:
    folder.mkdir()
    adapter = BaseModel.load(base.name_or_path, device="cpu").new_adapter(
        LoraConfig(rank=2, seed=1, train_unembed=unembed)
    )
    for name, data in peft_files(adapter, "base", base).items():
        (folder / name).write_bytes(data)
    return folder


def test_every_sequence_is_a_request_of_its_own_with_a_seed_of_its_own(
    engine: ExternalEngine, server: FakeServer
) -> None:
    request = ask("r", [7, 8, 9], num_samples=3, max_tokens=4, seed=5, top_k=9000, top_p=0.0, stop_tokens=(12,))
    got = result(engine, request)
    assert [(s.stop_reason, s.tokens.tolist()) for s in got.sequences] == [("stop", [10, 11, 12])] * 3
    assert got.sequences[0].logprobs.tolist() == [LOGPROB] * 3
    assert got.prompt_cache_hit_tokens == 3
    assert len({body["seed"] for body in server.completions}) == 3
    [body] = server.completions[:1]
    assert (body["model"], body["prompt"], body["max_tokens"], body["ignore_eos"]) == ("base", [7, 8, 9], 4, True)
    assert (body["top_k"], 0 < body["top_p"] < 1e-6, body["stop_token_ids"]) == (0, True, [12])


def test_scores_of_prompt_and_sample(engine: ExternalEngine, server: FakeServer) -> None:
    got = result(
        engine,
        ask(
            "r",
            [7, 8, 9],
            max_tokens=2,
            num_samples=2,
            prompt_logprobs=True,
            topk_prompt_logprobs=2,
            topk_sample_logprobs=3,
            prompt_logprobs_last_n=1,
            stop_tokens=(),
        ),
    )
    assert np.isnan(got.prompt_logprobs).tolist() == [True, True, False]  # type: ignore[arg-type]
    assert got.prompt_logprobs is not None
    assert got.prompt_logprobs[2] == np.float32(LOGPROB)
    assert got.topk_prompt_logprobs is not None
    assert got.topk_prompt_logprobs.token_ids[2].tolist() == [509, 510]
    assert got.sequences[1].topk is not None
    assert got.sequences[1].topk.token_ids.tolist() == [[510, 511, 512], [511, 512, 513]]
    assert ["prompt_logprobs" in body for body in server.completions] == [True, False]


def test_text_ends_a_sequence_where_it_is_complete(engine: ExternalEngine) -> None:
    [sequence] = result(engine, ask("r", [7, 8], max_tokens=9, stop_strings=("10><11",))).sequences
    assert (sequence.stop_reason, sequence.tokens.tolist()) == ("stop", [9, 10, 11])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"targets": PromptTargets((1, 1), [5])}, "target_prompt_logprobs"),
        ({"alternatives": 2}, "prompt_alt_tokens_k"),
        ({"temperature": 2.5}, r"sampling_params\.temperature"),
        ({"temperature": 0.001}, r"sampling_params\.temperature"),
    ],
)
def test_what_the_server_cannot_do_is_refused_by_name(
    engine: ExternalEngine, server: FakeServer, options: dict[str, Any], name: str
) -> None:
    with pytest.raises(InvalidRequest, match=name):
        result(engine, ask("r", [7, 8], max_tokens=2, **options))
    assert not server.completions


def test_an_adapter_is_loaded_under_its_own_name_and_unloaded_after_its_last_job(
    engine: ExternalEngine, server: FakeServer, outline: BaseModel, tmp_path: Path
) -> None:
    folder = written(outline, tmp_path / "adapter", unembed=False)
    first, second = engine.load_adapter("snap", folder), engine.load_adapter("snap", folder)
    assert server.adapters == {first.name, second.name}
    server.held.clear()
    outcomes = Outcomes()
    engine.submit(outcomes.job(ask("r", [7, 8], max_tokens=2, prompt_logprobs=True), first))
    engine.step()
    engine.unload_adapter(first)
    engine.unload_adapter(second)
    wait_for(lambda: server.adapters == {first.name})
    server.held.set()
    wait_for(lambda: engine.step() or len(outcomes) == 1)
    assert isinstance(outcomes["r"], SampleResult)
    assert server.completions[0]["model"] == first.name
    wait_for(lambda: not server.adapters)
    with pytest.raises(BadSnapshot, match="no such rank"):
        engine.load_adapter("broken", folder)


def test_prompt_logprobs_under_an_adapter_of_the_unembedding_are_refused(
    engine: ExternalEngine, outline: BaseModel, tmp_path: Path
) -> None:
    handle = engine.load_adapter("snap", written(outline, tmp_path / "adapter", unembed=True))
    with pytest.raises(InvalidRequest, match=r"prompt_logprobs: .*train_unembed"):
        result(engine, ask("r", [7, 8], max_tokens=2, prompt_logprobs=True), handle)
    assert len(result(engine, ask("r", [7, 8], max_tokens=2), handle).sequences) == 1


def test_errors_of_the_server_end_their_own_request_only(engine: ExternalEngine, server: FakeServer) -> None:
    server.answer = lambda body: httpx.Response(400, json={"error": {"message": "too long"}})
    with pytest.raises(InvalidRequest, match="too long"):
        result(engine, ask("a", [7, 8], max_tokens=2))
    server.answer = lambda body: httpx.Response(500, text="oh")
    with pytest.raises(EngineFailure, match="500"):
        result(engine, ask("b", [7, 8], max_tokens=2))
    server.answer = lambda body: httpx.Response(200, json={"choices": []})
    with pytest.raises(EngineFailure):
        result(engine, ask("c", [7, 8], max_tokens=2))
    server.answer = None
    assert len(result(engine, ask("d", [7, 8], max_tokens=2)).sequences) == 1


def test_a_cancelled_request_ends_while_the_server_still_computes(engine: ExternalEngine, server: FakeServer) -> None:
    server.held.clear()
    outcomes = Outcomes()
    engine.submit(outcomes.job(ask("r", [7, 8], max_tokens=2)))
    engine.step()
    wait_for(lambda: server.completions)
    engine.cancel("r")
    engine.step()
    assert isinstance(outcomes["r"], Cancelled)
    assert (engine.running, engine.waiting) == (0, 0)


def test_a_server_that_does_not_serve_the_model_is_named(outline: BaseModel, server: FakeServer) -> None:
    with pytest.raises(ValueError, match=r"TINWORKS_VLLM_MODEL: .* serves base, not 'other'"):
        ExternalEngine(outline, ExternalOptions("http://there", model="other", transport=server))


def test_the_servers_context_is_the_limit(engine: ExternalEngine, server: FakeServer) -> None:
    with pytest.raises(InvalidRequest, match="context has 100"):
        result(engine, ask("r", [7] * 101, max_tokens=2))
    result(engine, ask("s", [7] * 98))
    assert server.completions[-1]["max_tokens"] == 2
