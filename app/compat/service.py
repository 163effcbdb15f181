"""What the OpenAI-compatible routes do: submit samples, follow them to their end, or relay them as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import orjson
from starlette.concurrency import run_in_threadpool

from app.compat.answers import ChatChoice, ChoiceShape, CompletionChoice, Envelope, Used
from app.compat.choices import Choice
from app.compat.connection import Emit, end_all
from app.compat.outcomes import Outcome, Score, SequenceOutcome, read_response
from app.compat.prompts import (
    Prompt,
    chat_prompt,
    chat_request,
    check_scores,
    completion_prompts,
    completion_request,
)
from app.compat.schemas import ChatBody, CompletionBody, SamplingBody
from app.compat.shelf import TokenizerShelf
from app.compat.tokenizer import ModelTokenizer
from app.sampling.direct import DirectSample, DirectSampling, DirectTarget
from app.wire.types import SampleRequest, StreamedToken

Shape = Callable[[int], ChoiceShape]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that is ready for the samplers: one sample per prompt, `n` choices of each."""

    body: SamplingBody
    target: DirectTarget
    tokenizer: ModelTokenizer
    requests: Sequence[SampleRequest]
    shapes: Sequence[Shape]
    envelope: Envelope
    drop_tokens: bool = False
    """Whether only the prompt was wanted: a sampler draws one token at least."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat's prompt, and the model that it is for."""

    model: str
    prompt: Prompt


class CompatService:
    """Chats and completions of one API process."""

    def __init__(self, direct: DirectSampling, tokenizers: TokenizerShelf) -> None:
        self._direct = direct
        self._tokenizers = tokenizers

    # -- what is asked

    async def render(self, owner_id: str, body: ChatBody) -> Rendered:
        """The prompt of a chat. Raises NotFound or InvalidRequest."""
        target, tokenizer = await self._model(owner_id, body)
        prompt = await chat_prompt(body, target.model, tokenizer)
        chat_request(body, prompt, target.model, tokenizer)
        return Rendered(body.model, prompt)

    async def chat(self, owner_id: str, body: ChatBody) -> Asked:
        """A chat, checked. Raises NotFound or InvalidRequest."""
        target, tokenizer = await self._model(owner_id, body)
        prompt = await chat_prompt(body, target.model, tokenizer)
        request = chat_request(body, prompt, target.model, tokenizer)
        check_scores([request], "top_logprobs")
        k = body.top_logprobs if body.logprobs else None
        envelope = Envelope("chat.completion", body.model)
        return Asked(body, target, tokenizer, [request], [lambda i: ChatChoice(i, tokenizer, k)], envelope)

    async def completion(self, owner_id: str, body: CompletionBody) -> Asked:
        """A completion, checked. Raises NotFound or InvalidRequest."""
        target, tokenizer = await self._model(owner_id, body)
        prompts = await completion_prompts(body, target.model, tokenizer)
        requests = [completion_request(body, prompt, target.model, tokenizer) for prompt in prompts]
        check_scores(requests, "logprobs")

        def shape(echo: str) -> Shape:
            return lambda i: CompletionChoice(i, tokenizer, body.logprobs, echo)

        shapes = [shape(prompt.text if body.echo else "") for prompt in prompts]
        envelope = Envelope("text_completion", body.model)
        return Asked(body, target, tokenizer, requests, shapes, envelope, drop_tokens=body.max_tokens == 0)

    async def _model(self, owner_id: str, body: SamplingBody) -> tuple[DirectTarget, ModelTokenizer]:
        target = await run_in_threadpool(self._direct.target, owner_id, body.model)
        return target, await self._tokenizers.get(target.model)

    # -- sampling

    async def submit(self, asked: Asked) -> list[DirectSample]:
        """Hand the request to the samplers. Raises TooBusy or Unavailable."""
        samples: list[DirectSample] = []
        try:
            for request in asked.requests:
                samples.append(await self._direct.submit(asked.target, request, stream=asked.body.stream))
        except BaseException:
            await self._close(samples)
            raise
        return samples

    async def answer(self, asked: Asked, samples: Sequence[DirectSample]) -> bytes:
        """The JSON of the whole answer. Whoever is cancelled here gives the samples up."""
        try:
            responses = await asyncio.gather(*map(self._response, samples))
        finally:
            await self._close(samples)
        return await run_in_threadpool(_whole, asked, responses)

    async def _response(self, sample: DirectSample) -> bytes:
        async with aclosing(self._direct.follow(sample)) as news:
            async for progress in news:
                if progress.response is not None:
                    return progress.response
        raise AssertionError("a sample ends with its response")

    # -- streaming

    async def stream(self, asked: Asked, samples: Sequence[DirectSample], emit: Emit) -> None:
        """Tell the answer as it grows. Whoever is cancelled here gives the samples up."""
        used = Used()
        relays = [
            asyncio.create_task(_Relay(asked, place, emit).run(self._direct, sample, used))
            for place, sample in enumerate(samples)
        ]
        try:
            await asyncio.gather(*relays)  # which passes every cancellation on; a TaskGroup would only pass the first
        finally:
            await end_all(relays)
            await self._close(samples)
        if asked.body.include_usage:
            await emit(asked.envelope.chunk([], usage=used.as_json()))

    async def _close(self, samples: Sequence[DirectSample]) -> None:
        await asyncio.gather(*(self._direct.close(sample) for sample in samples))


class _Relay:
    """Relays one sample of a stream: the choices of one prompt."""

    def __init__(self, asked: Asked, place: int, emit: Emit) -> None:
        self._asked = asked
        self._place = place
        self._emit = emit
        first = place * asked.body.n
        self._choices = [Choice(asked.tokenizer, asked.body.stops) for _ in range(asked.body.n)]
        self._shapes = [asked.shapes[place](first + i) for i in range(asked.body.n)]

    async def run(self, direct: DirectSampling, sample: DirectSample, used: Used) -> None:
        """Until the sample is finished; adds what it used to `used`."""
        for shape in self._shapes:
            await self._send(shape.opening())
        async with aclosing(direct.follow(sample)) as news:
            async for progress in news:
                if progress.response is None:
                    await self._grow(progress.tokens)
                else:
                    prompt = self._asked.requests[self._place].prompt
                    await self._finish(await run_in_threadpool(read_response, progress.response, prompt), used)

    async def _grow(self, tokens: Sequence[StreamedToken]) -> None:
        """Pass on what follows what the choices have: after a sampler's death its successor begins anew."""
        new: dict[int, list[Score]] = {}
        for token in tokens:
            scores = new.setdefault(token.index, [])
            if token.position == self._choices[token.index].tokens + len(scores) and not self._asked.drop_tokens:
                scores.append(Score(token.token, token.logprob, token.topk))
        for index, scores in new.items():
            if scores:
                await self._send(self._shapes[index].piece(self._choices[index].take(scores)))

    async def _finish(self, outcome: Outcome, used: Used) -> None:
        for choice, shape, sequence in zip(self._choices, self._shapes, outcome.sequences, strict=True):
            piece, reason = choice.finish(_wanted(self._asked, sequence))
            await self._send(shape.piece(piece))
            await self._send(shape.closing(reason))
        _count(used, self._asked, self._place, outcome)

    async def _send(self, choice: dict[str, object] | None) -> None:
        if choice is not None:
            usage = {"usage": None} if self._asked.body.include_usage else {}
            await self._emit(self._asked.envelope.chunk([choice], **usage))


def _whole(asked: Asked, responses: Sequence[bytes]) -> bytes:
    used, choices = Used(), []
    for place, (request, response) in enumerate(zip(asked.requests, responses, strict=True)):
        outcome = read_response(response, request.prompt)
        for i, sequence in enumerate(outcome.sequences):
            piece, reason = Choice(asked.tokenizer, asked.body.stops).finish(_wanted(asked, sequence))
            choices.append(asked.shapes[place](place * asked.body.n + i).whole(piece, outcome.prompt, reason))
        _count(used, asked, place, outcome)
    return orjson.dumps(asked.envelope.answer(choices, used))


def _wanted(asked: Asked, sequence: SequenceOutcome) -> SequenceOutcome:
    return SequenceOutcome([], "length") if asked.drop_tokens else sequence


def _count(used: Used, asked: Asked, place: int, outcome: Outcome) -> None:
    used.prompt += len(asked.requests[place].prompt)
    used.cached += outcome.cached_tokens
    used.completion += sum(len(_wanted(asked, sequence).scores) for sequence in outcome.sequences)
