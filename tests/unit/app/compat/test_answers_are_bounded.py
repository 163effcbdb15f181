"""What one request may make of a process's memory and of its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from fastapi import Request

from app.compat import routes
from app.compat.prompts import MOST_SCORES, check_scores
from app.compat.schemas import CompletionBody
from app.errors import InvalidRequest
from app.wire.types import SampleRequest, SamplingParams


def asked(n: int, max_tokens: int, k: int, *, prompt_k: int = 0) -> SampleRequest:
    return SampleRequest(
        "r", [1] * 1000, SamplingParams(max_tokens=max_tokens), n, topk_sample_logprobs=k, topk_prompt_logprobs=prompt_k
    )


@pytest.mark.parametrize(
    "requests",
    [
        [asked(128, 32_000, 20)],
        [asked(1, 100, 20)] * 3000,
        [asked(1, 1, 0, prompt_k=20)] * 300,
    ],
    ids=["choices", "prompts", "echoes"],
)
def test_more_logprobs_than_a_process_can_hold_are_refused(requests: list[SampleRequest]) -> None:
    with pytest.raises(InvalidRequest, match=f"^top_logprobs: up to [0-9]+ logprobs, more than {MOST_SCORES}"):
        check_scores(requests, "top_logprobs")


def test_the_most_logprobs_of_one_long_choice_are_possible() -> None:
    check_scores([asked(1, 131_072, 20)], "top_logprobs")
    check_scores([asked(128, 131_072, 0)], "top_logprobs")


def request_of(body: bytes) -> Request:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


@pytest.mark.parametrize(("tokens", "beside"), [(3, False), (100_000, True)])
def test_a_large_body_is_checked_away_from_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, tokens: int, beside: bool
) -> None:
    threads: list[threading.Thread] = []
    parse: Callable[..., CompletionBody] = routes.parse

    def watched(kind: type[CompletionBody], body: object) -> CompletionBody:
        threads.append(threading.current_thread())
        return parse(kind, body)

    monkeypatch.setattr(routes, "parse", watched)
    body = orjson.dumps({"model": "tiny", "prompt": [1] * tokens})
    found = asyncio.run(routes._body(request_of(body), CompletionBody))
    assert len(found.prompts[0]) == tokens
    assert (threads[0] is not threading.main_thread()) is beside
