"""From a body to requests that a sampler can take: text or messages become tokens, and everything is checked."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace

from starlette.concurrency import run_in_threadpool

from app.compat.errors import ContextExceeded
from app.compat.messages import for_template
from app.compat.schemas import ChatBody, CompletionBody, SamplingBody
from app.compat.template import PromptTooLong
from app.compat.tokenizer import ModelTokenizer
from app.errors import InvalidRequest
from app.fleet.service import ServedModel
from app.sampling.direct import new_request_id
from app.wire.types import SampleRequest, SamplingParams

_CHARACTERS_PER_TOKEN = 32
_CHARACTERS_BESIDES = 1024
MOST_SCORES = 1 << 22
"""Logprobs of alternatives in one answer; as JSON each takes a hundred bytes, in memory many more."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as text and as tokens."""

    text: str
    tokens: list[int]


async def chat_prompt(body: ChatBody, model: ServedModel, tokenizer: ModelTokenizer) -> Prompt:
    """The rendered conversation. Raises InvalidRequest."""
    prompt = await run_in_threadpool(_rendered, body, model, tokenizer)
    _check("messages", prompt.tokens, model)
    return prompt


async def completion_prompts(body: CompletionBody, model: ServedModel, tokenizer: ModelTokenizer) -> list[Prompt]:
    """The prompts of a completion. Raises InvalidRequest."""
    prompts = await run_in_threadpool(lambda: [_as_it_is(prompt, model, tokenizer) for prompt in body.prompts])
    for prompt in prompts:
        _check("prompt", prompt.tokens, model)
    return prompts


def chat_request(body: ChatBody, prompt: Prompt, model: ServedModel, tokenizer: ModelTokenizer) -> SampleRequest:
    """What is sampled for a chat: the rest of the context, unless it says less. Raises ContextExceeded."""
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    request = _request(body, prompt, body.limit, field, model, tokenizer)
    return replace(request, topk_sample_logprobs=body.top_logprobs)


def completion_request(
    body: CompletionBody, prompt: Prompt, model: ServedModel, tokenizer: ModelTokenizer
) -> SampleRequest:
    """What is sampled for one prompt: 16 tokens, unless it says otherwise. Raises ContextExceeded."""
    limit = 16 if body.max_tokens is None else max(1, body.max_tokens)
    if body.max_tokens is None:
        limit = min(limit, model.context_length - len(prompt.tokens))
    request = _request(body, prompt, limit, "max_tokens", model, tokenizer)
    k = body.logprobs or 0
    if not body.echo or body.logprobs is None:
        return replace(request, topk_sample_logprobs=k)
    return replace(request, topk_sample_logprobs=k, prompt_logprobs=True, topk_prompt_logprobs=k)


def check_scores(requests: Sequence[SampleRequest], field: str) -> None:
    """Raise InvalidRequest, naming `field`, if the answer could hold more logprobs than a process can."""
    cells = sum(
        request.num_samples * (request.params.max_tokens or 0) * request.topk_sample_logprobs
        + len(request.prompt) * request.topk_prompt_logprobs
        for request in requests
    )
    if cells > MOST_SCORES:
        raise InvalidRequest(
            f"{field}: up to {cells} logprobs, more than {MOST_SCORES}; ask for fewer tokens or choices"
        )


def _rendered(body: ChatBody, model: ServedModel, tokenizer: ModelTokenizer) -> Prompt:
    tools = [tool.raw for tool in body.tools] if body.tools and body.tool_choice != "none" else None
    begin_answer = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    try:
        text = tokenizer.templates.render(
            for_template(body.messages),
            tools,
            add_generation_prompt=begin_answer,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
            most_characters=_most_characters(model),
        )
    except PromptTooLong as error:
        raise ContextExceeded(f"{error.detail}; the model's context has {model.context_length} tokens") from error
    return Prompt(text, tokenizer.encode(text, add_special_tokens=False))


def _as_it_is(prompt: str | list[int], model: ServedModel, tokenizer: ModelTokenizer) -> Prompt:
    if not isinstance(prompt, str):
        _check("prompt", prompt, model)
        return Prompt(tokenizer.decode(prompt), prompt)
    if len(prompt) > _most_characters(model):
        raise ContextExceeded(f"prompt: {len(prompt)} characters exceed the context of {model.context_length} tokens")
    return Prompt(prompt, tokenizer.encode(prompt, add_special_tokens=True))


def _most_characters(model: ServedModel) -> int:
    """Longer texts do not fit into the context, whatever they are, or not into a server's patience."""
    return model.context_length * _CHARACTERS_PER_TOKEN + _CHARACTERS_BESIDES


def _check(field: str, tokens: Sequence[int], model: ServedModel) -> None:
    if not tokens:
        raise InvalidRequest(f"{field}: has no tokens")
    if max(tokens) >= model.vocab_size:
        raise InvalidRequest(f"{field}: token {max(tokens)} is outside the vocabulary of {model.vocab_size}")
    if len(tokens) >= model.context_length:
        context = model.context_length
        raise ContextExceeded(f"{field}: {len(tokens)} tokens leave no room in the model's context of {context}")


def _request(
    body: SamplingBody, prompt: Prompt, limit: int | None, field: str, model: ServedModel, tokenizer: ModelTokenizer
) -> SampleRequest:
    room = model.context_length - len(prompt.tokens)
    if limit is not None and limit > room:
        context, used = model.context_length, len(prompt.tokens)
        raise ContextExceeded(f"{field}: {limit}, with a prompt of {used}, exceeds the model's context of {context}")
    seed = secrets.randbits(63) if body.stream and body.seed is None else body.seed
    params = SamplingParams(
        max_tokens=room if limit is None else limit,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=seed,
        stop_tokens=tokenizer.eos_token_ids,
        stop_strings=body.stops,
    )
    return SampleRequest(new_request_id(), prompt.tokens, params, body.n)
