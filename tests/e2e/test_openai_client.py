"""The official OpenAI client, pointed at the service: it gets what the Tinker SDK would sample."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tinker
from openai import OpenAI
from tinker import types
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.e2e.conftest import MODEL
from tests.e2e.data import batch, train
from tests.e2e.service import Service, wait_until

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2? 🎉"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}},
]


@pytest.fixture
def key() -> str:
    return f"tml-{uuid.uuid4().hex}"


@pytest.fixture
def client(service: Service, key: str) -> OpenAI:  # type: ignore[override]
    return OpenAI(base_url=f"{service.base_url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def tokenizer(service: Service) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(service.data_dir / "models" / MODEL)
    return found


def streamed(client: OpenAI, **fields: Any) -> tuple[str, str | None, int]:
    """Text, finish reason and number of chunks of a streamed chat."""
    text, reason, chunks = "", None, 0
    for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **fields):
        [choice] = chunk.choices
        text += choice.delta.content or ""
        reason = choice.finish_reason or reason
        chunks += 1
    return text, reason, chunks


def test_a_completion_is_what_the_sdk_samples(
    client: OpenAI, service: Service, key: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    sampler = tinker.ServiceClient(base_url=service.base_url, api_key=key).create_sampling_client(base_model=MODEL)
    prompt = tokenizer.encode("English: banana")
    params = types.SamplingParams(max_tokens=9, seed=5, stop=[])
    sequences = sampler.sample(types.ModelInput.from_ints(prompt), 2, params).result(60).sequences
    wanted = [tokenizer.decode(list(sequence.tokens), skip_special_tokens=True) for sequence in sequences]
    for given in ("English: banana", prompt):
        answer = client.completions.create(model=MODEL, prompt=given, max_tokens=9, seed=5, n=2)
        assert [choice.text for choice in answer.choices] == wanted
        assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
        assert answer.usage.completion_tokens == sum(len(sequence.tokens) for sequence in sequences)


def test_a_stream_is_the_answer_in_pieces(client: OpenAI) -> None:
    fields: Any = {"max_completion_tokens": 40, "seed": 3}
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields).choices[0]
    text, reason, chunks = streamed(client, **fields)
    assert (text, reason) == (whole.message.content, whole.finish_reason)
    assert chunks > 10
    pieces = client.completions.create(model=MODEL, prompt="Hi", max_tokens=12, seed=3, stream=True, echo=True)
    assert "".join(piece.choices[0].text for piece in pieces).startswith("Hi")


def test_a_seed_repeats_and_without_one_nothing_does(client: OpenAI) -> None:
    def texts(**fields: Any) -> list[str | None]:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3, max_tokens=8, **fields)
        return [choice.message.content for choice in answer.choices]

    assert texts(seed=1) == texts(seed=1) and len(set(texts(seed=1))) == 3
    assert texts() != texts()


def test_logprobs_are_of_the_tokens_and_their_rivals(client: OpenAI) -> None:
    greedy: Any = {"temperature": 0, "max_tokens": 6}
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, **greedy)
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    for entry in chat.choices[0].logprobs.content:
        assert entry.bytes is not None and bytes(entry.bytes).decode(errors="replace") == entry.token
        assert entry.top_logprobs[0].token == entry.token and entry.top_logprobs[0].logprob == entry.logprob
        assert entry.top_logprobs[1].logprob <= entry.logprob
    whole = client.completions.create(model=MODEL, prompt="Hello there", echo=True, logprobs=1, **greedy).choices[0]
    again = client.completions.create(model=MODEL, prompt=whole.text, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert whole.logprobs is not None and again.logprobs is not None and again.text == whole.text
    scored, sampled = again.logprobs.token_logprobs, whole.logprobs.token_logprobs
    assert scored is not None and sampled is not None and sampled[0] is None
    assert again.logprobs.tokens == whole.logprobs.tokens, "the text must be tokenised as it was sampled"
    assert scored[1:] == pytest.approx(sampled[1:], abs=1e-4)


def test_a_stop_string_ends_the_text_and_is_not_in_it(client: OpenAI) -> None:
    fields: Any = {"max_tokens": 30, "seed": 11}
    text = client.chat.completions.create(model=MODEL, messages=MESSAGES, **fields).choices[0].message.content
    assert text is not None
    stop = text[10:13]
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, stop=[stop], **fields)
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert streamed(client, stop=[stop], **fields)[:2] == (text[: text.index(stop)], "stop")


def test_rendered_tokens_are_those_of_apply_chat_template(client: OpenAI, tokenizer: PreTrainedTokenizerBase) -> None:
    body = {"model": MODEL, "messages": MESSAGES, "tools": TOOLS}
    rendered: Any = client.post("/chat/completions/render", body=body, cast_to=object)
    wanted = tokenizer.apply_chat_template(MESSAGES, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    assert rendered["token_ids"] == wanted
    assert rendered["prompt"] == tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    used = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1).usage
    assert used is not None and used.prompt_tokens == len(rendered["token_ids"])


def test_a_checkpoint_answers_as_its_adapter(
    client: OpenAI, service: Service, key: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    owner = tinker.ServiceClient(base_url=service.base_url, api_key=key)
    run = owner.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result(30)
    train(run, batch(3, [30]), 6, lr=1e-2)
    path = run.save_weights_for_sampler("openai").result(60).path
    sampler = owner.create_sampling_client(model_path=path)
    prompt = types.ModelInput.from_ints(tokenizer.encode("Hello"))
    params = types.SamplingParams(max_tokens=8, temperature=0.0, stop=[])
    tokens = sampler.sample(prompt, 1, params).result(60).sequences[0].tokens
    fields: Any = {"prompt": "Hello", "max_tokens": 8, "temperature": 0}
    text = client.completions.create(model=path, **fields).choices[0].text
    assert text == tokenizer.decode(list(tokens), skip_special_tokens=True)
    assert text != client.completions.create(model=MODEL, **fields).choices[0].text
    assert path in [model.id for model in client.models.list()]
    assert client.models.retrieve(path).id == path
    stranger = client.with_options(api_key=f"tml-{uuid.uuid4().hex}")
    with pytest.raises(openai.NotFoundError):
        stranger.completions.create(model=path, **fields)


def test_errors_are_the_clients_own(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="sk-wrong").models.list()
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, frequency_penalty=0.5)
    assert refused.value.param == "frequency_penalty"


def sampled_tokens(service: Service, key: str) -> int:
    """Tokens that a tenant's usage shows."""
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    window = {"starting_on": hour.isoformat(), "ending_before": (hour + timedelta(hours=2)).isoformat()}
    url = f"{service.base_url}/api/v1/billing/usage/events"
    events = httpx.get(url, params=window, headers={"x-api-key": key}).json()["data"]
    return sum(e["event_info"]["token_count"] for e in events if e["event_info"]["type"] == "sampling_sample")


def test_what_a_client_gives_up_is_neither_sampled_to_its_end_nor_billed(
    client: OpenAI, service: Service, key: str
) -> None:
    fields: Any = {"model": MODEL, "prompt": "Hi", "max_tokens": 1900, "n": 8}
    for _ in range(10):
        with client.completions.create(stream=True, **fields) as stream:
            next(iter(stream))
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).completions.create(**fields)
    later = client.completions.create(**fields).usage  # it began last, so the others would be finished before it
    assert later is not None
    wait_until(lambda: sampled_tokens(service, key) >= later.completion_tokens, timeout_s=10, what="usage is written")
    assert sampled_tokens(service, key) == later.completion_tokens


@pytest.mark.slow
def test_a_stream_outlives_its_worker(tmp_path: Path) -> None:
    service = Service(tmp_path / "data", environment={"TINWORKS_SAMPLE_CLAIM_S": "2"})
    service.start()
    try:
        client = OpenAI(base_url=f"{service.base_url}/v1", api_key="tml-outlives", timeout=120, max_retries=0)
        fields: Any = {"prompt": "Hi", "max_tokens": 400, "seed": 7, "stream": True}
        quiet = "".join(chunk.choices[0].text for chunk in client.completions.create(model=MODEL, **fields))
        told, chunks = "", 0
        for chunk in client.completions.create(model=MODEL, **fields):
            told += chunk.choices[0].text
            chunks += 1
            if chunks == 30:
                service.kill("worker")
        assert told == quiet and chunks > 60
    finally:
        assert service.stop() == 0
