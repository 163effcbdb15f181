"""The OpenAI-compatible routes over HTTP: who may ask, how errors look, what a stream tells while a sampler works."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import redis

from app.checkpoints.service import tinker_path
from app.fleet.models import Model
from app.runs.models import Run
from app.sampling.keys import tokens_key, unfinished_key
from app.settings import Settings
from app.storage.blobs import get_blob_store
from app.wire.types import SampledSequence, SampleResult, StreamedToken
from tests.factories import POOL, add_checkpoint
from tests.integration.conftest import Api, running
from tests.integration.held_engine import HeldEngine, base_model_only
from tests.services import wait_for
from tests.unit.app.compat.tokenizer_lab import END, hugging_face, ours
from workers.model.tiny import CHAT_TEMPLATE
from workers.model.tokenizer import pack_tokenizer
from workers.sample.engines.base import Job
from workers.sample.service import SampleService

MESSAGES = [{"role": "user", "content": "hello"}]
CHAT = {"model": "tiny", "messages": MESSAGES}
VOCABULARY, CONTEXT = 400, 300


class TellingEngine(HeldEngine):
    """A held engine that also draws the tokens that the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.take: Callable[[list[str]], None] = lambda request_ids: None
        self.drawn: deque[tuple[Job, StreamedToken]] = deque()

    def step(self) -> bool:
        told = len(self.drawn)
        for _ in range(told):
            job, token = self.drawn.popleft()
            assert job.on_token is not None
            job.on_token(token)
        return super().step() or bool(told)

    @property
    def request_id(self) -> str:
        """The one that is running."""
        wait_for(lambda: len(self.jobs) == 1)
        return next(iter(self.jobs))

    def draw(self, tokens: list[int], start: int = 0, index: int = 0) -> None:
        """The next tokens of the running request."""
        job = self.jobs[self.request_id]
        self.drawn.extend((job, StreamedToken(index, at, token, -1.0)) for at, token in enumerate(tokens, start))
        self.take(["nothing"])  # wakes the sampler

    def finish(self, *sequences: list[int], reason: str = "length") -> None:
        """Its result."""
        drawn = [SampledSequence(reason, np.array(s, np.int32), np.full(len(s), -1.0, np.float32)) for s in sequences]
        self.end(self.request_id, SampleResult(drawn, prompt_cache_hit_tokens=2))
        self.take(["nothing"])


@pytest.fixture
def chat_api(api: Api) -> Api:
    """The service, with a tokenizer of its model in the blob store."""
    tokenizer = copy.deepcopy(hugging_face("byte_level"))  # which is shared
    tokenizer.chat_template = CHAT_TEMPLATE
    packed = pack_tokenizer(tokenizer, (END,))
    assert packed is not None
    get_blob_store().put("tokenizers/test.json", packed)
    with api.database.write() as session:
        model = session.get_one(Model, POOL)
        model.tokenizer_blob, model.vocab_size, model.context_length = "tokenizers/test.json", VOCABULARY, CONTEXT
    return api


@pytest.fixture
def server(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def engine(server: redis.Redis) -> Iterator[TellingEngine]:
    """The engine of a sampler that takes what waits."""
    held = TellingEngine()
    usage = SimpleNamespace(start=lambda: None, stop=lambda timeout_s: None, counted=lambda stored, deliver: deliver)
    stubs: dict[str, Any] = {"usage": usage, "adapters": base_model_only(held)}
    stubs["recorder"] = SimpleNamespace(start=lambda: None, stop=lambda timeout_s: None)
    settings = Settings(sample_claim_s=0.3)
    sampler = SampleService(worker_id="w1", pool=POOL, engine=held, redis=server, settings=settings, **stubs)
    sampler.start()
    held.take = sampler.take
    yield held
    sampler.stop(5)


def ask(api: Api, path: str, body: object, *, who: str = "alice", **headers: str) -> httpx.Response:
    """A request as OpenAI's clients send it."""
    sent = {"authorization": f"Bearer {api.keys[who]}"} | headers
    return api.client.post(f"/v1/{path}", json=body, headers=sent)


def error(answer: httpx.Response) -> dict[str, Any]:
    """The error of an answer, whose shape must be whole."""
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"} and found["message"]
    return found


class Stream:
    """A stream that is being read: its events as they come."""

    def __init__(self, api: Api, path: str, body: dict[str, Any]) -> None:
        headers = {"authorization": f"Bearer {api.keys['alice']}"}
        self._context = api.client.stream("POST", f"/v1/{path}", json=body | {"stream": True}, headers=headers)

    def __enter__(self) -> Stream:
        self.answer = self._context.__enter__()
        assert self.answer.status_code == 200, self.answer.read()
        self._lines = self.answer.iter_lines()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def event(self) -> dict[str, Any] | None:
        """The next event; None at the end."""
        line = next(line for line in self._lines if line.startswith("data: "))
        return None if line == "data: [DONE]" else json.loads(line.removeprefix("data: "))

    def text(self) -> str:
        """The text of the next chunk."""
        event = self.event()
        assert event is not None
        [choice] = event["choices"]
        return str(choice["delta"].get("content", ""))

    def rest(self) -> list[dict[str, Any]]:
        return list(iter(self.event, None))


def take(server: redis.Redis, engine: TellingEngine) -> str:
    """Have the sampler take the request that waits, as a Celery message would."""
    wait_for(lambda: server.zcard(unfinished_key(POOL)))
    [waiting] = server.zrange(unfinished_key(POOL), 0, -1)
    engine.take([waiting.decode()])
    return engine.request_id


def tokens(text: str) -> list[int]:
    return ours("byte_level").encode(text, add_special_tokens=False)


# -- who asks, and errors


@pytest.mark.parametrize("path", ["completions", "chat/completions", "chat/completions/render"])
def test_a_key_is_needed_in_either_header(chat_api: Api, path: str) -> None:
    answer = chat_api.client.post(f"/v1/{path}", json={})
    assert answer.status_code == 401 and error(answer)["code"] == "invalid_api_key"
    wrong = ask(chat_api, path, {}, authorization="Bearer tml-wrong")
    assert wrong.status_code == 401
    for headers in ({"authorization": ""}, {"authorization": f"bearer {chat_api.keys['alice']}"}):
        headers |= {"x-api-key": chat_api.keys["alice"]}
        assert ask(chat_api, path, {}, **headers).status_code == 400


@pytest.mark.parametrize(
    ("path", "fields", "status", "param", "code"),
    [
        ("chat/completions", {"model": "gone"}, 404, "model", "model_not_found"),
        ("chat/completions", {"model": "tinker://x/sampler_weights/y"}, 404, "model", "model_not_found"),
        ("chat/completions", {"model": "tinker://nonsense"}, 404, "model", "model_not_found"),
        ("chat/completions", {"temperature": "hot"}, 400, "temperature", None),
        ("chat/completions", {"max_tokens": CONTEXT}, 400, "max_tokens", "context_length_exceeded"),
        ("chat/completions/render", {"max_completion_tokens": CONTEXT}, 400, "max_completion_tokens", None),
        ("chat/completions", {"messages": [{"role": "user"}]}, 400, "messages", None),
        ("chat/completions", {"messages": [{"role": "user", "content": "!?" * CONTEXT}]}, 400, "messages", None),
        ("completions", {"prompt": "!?" * 99999}, 400, "prompt", "context_length_exceeded"),
        ("completions", {"prompt": [VOCABULARY]}, 400, "prompt", None),
        ("completions", {"prompt": ["hi", ""]}, 400, "prompt", None),
    ],
)
def test_what_cannot_be_is_refused_in_openais_shape(
    chat_api: Api, path: str, fields: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    body = CHAT | fields
    if path == "completions":
        body = {"model": "tiny"} | fields
    answer = ask(chat_api, path, body)
    assert answer.status_code == status, answer.text
    assert error(answer)["param"] == param
    assert code is None or error(answer)["code"] == code


def test_bodies_and_paths_that_are_none_have_errors_of_that_shape_too(chat_api: Api) -> None:
    key = {"authorization": f"Bearer {chat_api.keys['alice']}"}
    assert error(chat_api.client.post("/v1/completions", content=b"{", headers=key))["param"] == "body"
    assert error(ask(chat_api, "completions", [1]))["param"] == "body"
    for answer, status in (
        (chat_api.client.get("/v1/nothing", headers=key), 404),
        (chat_api.client.get("/v1/completions", headers=key), 405),
        (chat_api.client.post("/v1/completions", content=b"x", headers=key | {"content-length": str(2**40)}), 413),
    ):
        assert answer.status_code == status and error(answer)


def test_a_model_without_a_tokenizer_says_so(api: Api) -> None:
    answer = ask(api, "completions", {"model": "tiny", "prompt": [1]})
    assert answer.status_code == 400 and "no tokenizer" in error(answer)["message"]


def test_a_full_queue_is_a_rate_limit(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Any
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path, max_waiting_samples=1) as api:
        chat = chat_api.__wrapped__(api)  # type: ignore[attr-defined]
        with Stream(chat, "chat/completions", CHAT):
            answer = ask(chat, "chat/completions", CHAT)
    assert answer.status_code == 429 and error(answer)["code"] == "rate_limit_exceeded"


# -- models


def test_models_are_the_served_ones_and_the_callers_sampler_checkpoints(chat_api: Api) -> None:
    model_id = chat_api.run()
    with chat_api.database.write() as session:
        run = session.get_one(Run, model_id)
        for kind, name in (("sampler_weights", "mine"), ("weights", "state")):
            add_checkpoint(session, run, name, kind=kind)
    mine = tinker_path(model_id, "sampler_weights", "mine")

    def listed(who: str) -> list[str]:
        answer = chat_api.client.get("/v1/models", headers={"authorization": f"Bearer {chat_api.keys[who]}"})
        return [model["id"] for model in answer.json()["data"]]

    assert listed("alice") == ["tiny", mine]
    assert listed("bob") == ["tiny"]
    one = chat_api.get(f"/v1/models/{mine}")
    assert one.json() | {"created": 0} == {
        "id": mine, "object": "model", "created": 0, "owned_by": "tinworks", "root": "tiny", "parent": "tiny",
        "max_model_len": CONTEXT,
    }  # fmt: skip
    assert chat_api.get(f"/v1/models/{mine}", who="bob").status_code == 404
    assert chat_api.get("/v1/models/tiny", who="bob").json()["parent"] is None


# -- answers


def test_rendering_samples_nothing(chat_api: Api, server: redis.Redis) -> None:
    answer = ask(chat_api, "chat/completions/render", CHAT).json()
    assert answer["prompt"] == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert answer["token_ids"] == tokens(answer["prompt"]) and answer["model"] == "tiny"
    assert server.zcard(unfinished_key(POOL)) == 0


def test_a_stream_tells_tokens_as_they_are_drawn(chat_api: Api, server: redis.Redis, engine: TellingEngine) -> None:
    drawn = [*tokens("hello, how"), END]
    with Stream(chat_api, "chat/completions", CHAT | {"stream_options": {"include_usage": True}}) as stream:
        opening = stream.event()
        assert opening is not None and opening["choices"][0]["delta"]["role"] == "assistant"
        request_id = take(server, engine)
        assert engine.jobs[request_id].request.params.seed is not None, "a repetition must give the same tokens"
        told = ""
        for at, token in enumerate(drawn[:-1]):
            engine.draw([token], at)
            told += stream.text()
        assert told == "hello, how"
        engine.finish(drawn, reason="stop")
        *_, closing, usage = stream.rest()
    assert closing["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(drawn)
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert not server.exists(tokens_key(request_id)), "what was delivered is forgotten"


def test_a_successor_that_begins_anew_repeats_nothing(
    chat_api: Api, server: redis.Redis, engine: TellingEngine
) -> None:
    first, second = tokens("hello"), tokens(", how")
    with Stream(chat_api, "chat/completions", CHAT) as stream:
        stream.event()
        take(server, engine)
        engine.draw(first)
        told = stream.text()
        engine.draw([*first, *second])
        told += stream.text()
        engine.finish([*first, *second, *tokens(" are")])
        told += "".join(event["choices"][0]["delta"].get("content", "") for event in stream.rest())
    assert told == "hello, how are"


def test_a_stream_goes_on_when_redis_has_lost_everything(
    chat_api: Api, server: redis.Redis, engine: TellingEngine
) -> None:
    drawn = tokens("hello")
    with Stream(chat_api, "chat/completions", CHAT) as stream:
        stream.event()
        request_id = take(server, engine)
        engine.draw(drawn[:1])
        told = stream.text()
        server.flushall()
        wait_for(lambda: server.zscore(unfinished_key(POOL), request_id))  # it was submitted again
        engine.draw(drawn[1:], 1)
        engine.finish(drawn)
        told += "".join(event["choices"][0]["delta"].get("content", "") for event in stream.rest())
    assert told == "hello"


def test_a_stream_that_fails_ends_with_an_error(chat_api: Api, server: redis.Redis, engine: TellingEngine) -> None:
    with Stream(chat_api, "chat/completions", CHAT) as stream:
        stream.event()
        engine.end(take(server, engine), RuntimeError("secret"))
        [last] = stream.rest()
    assert last["error"]["type"] == "server_error" and "secret" not in json.dumps(last)


def test_a_client_that_leaves_cancels_its_sample(chat_api: Api, server: redis.Redis, engine: TellingEngine) -> None:
    with Stream(chat_api, "chat/completions", CHAT) as stream:
        stream.event()
        take(server, engine)
    wait_for(lambda: not engine.jobs)


def test_prompts_and_n_make_choices_in_order(chat_api: Api, server: redis.Redis, engine: TellingEngine) -> None:
    body = {"model": "tiny", "prompt": ["hello", "how"], "n": 2, "stop": ["you"], "max_tokens": 5}
    with Stream(chat_api, "completions", body) as stream:
        wait_for(lambda: server.zcard(unfinished_key(POOL)) == 2)
        for waiting in server.zrange(unfinished_key(POOL), 0, -1):
            engine.take([waiting.decode()])
        wait_for(lambda: len(engine.jobs) == 2)
        for request_id, job in list(engine.jobs.items()):
            first = ours("byte_level").decode(job.request.prompt)
            assert job.request.params.stop_strings == ("you",) and job.request.params.stop_tokens == (END,)
            texts = [f"{first} 1", f"{first} 2 you"]
            drawn = [SampledSequence("length", np.array(tokens(t)), np.zeros(len(tokens(t)))) for t in texts]
            engine.end(request_id, SampleResult(drawn))
        told: dict[int, str] = dict.fromkeys(range(4), "")
        reasons = {}
        for event in stream.rest():
            [choice] = event["choices"]
            told[choice["index"]] += choice["text"]
            reasons[choice["index"]] = choice["finish_reason"]
    assert told == {0: "hello 1", 1: "hello 2 ", 2: "how 1", 3: "how 2 "}
    assert reasons == {0: "length", 1: "stop", 2: "length", 3: "stop"}
