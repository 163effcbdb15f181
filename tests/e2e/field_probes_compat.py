"""OpenAI-compatible requests with some fields changed, and their answers."""

from __future__ import annotations

import json
from typing import Any

import httpx

from tests.e2e.field_world import Changes, World

_PASSING = ("id", "created", "system_fingerprint")


def _told(world: World, answer: httpx.Response) -> Any:
    """An answer, or the chunks of a stream, without what is new every time. How much was cached is left out too."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        return [_lasting(json.loads(line)) for line in lines]
    return _lasting(world.json(answer))


def _lasting(told: Any) -> Any:
    if not isinstance(told, dict):
        return told
    kept = {key: value for key, value in told.items() if key not in _PASSING}
    if isinstance(kept.get("usage"), dict):
        kept["usage"] = {key: value for key, value in kept["usage"].items() if key != "prompt_tokens_details"}
    return kept


def completion(world: World, changes: Changes) -> Any:
    """`/v1/completions`."""
    base = {"model": "tiny", "prompt": "The number of", "max_tokens": 4, "seed": 1, "temperature": 1.0}
    return _told(world, world.wire.http.post(f"{world.base_url}/v1/completions", json=world.body(base, changes)))


CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "How many cats?"}], "max_tokens": 4, "seed": 1}


def chat(world: World, changes: Changes) -> Any:
    """`/v1/chat/completions`."""
    return _told(world, world.wire.http.post(f"{world.base_url}/v1/chat/completions", json=world.body(CHAT, changes)))


def render(world: World, changes: Changes) -> Any:
    """`/v1/chat/completions/render`: the prompt."""
    answer = world.wire.http.post(f"{world.base_url}/v1/chat/completions/render", json=world.body(CHAT, changes))
    return _told(world, answer)


def by_key(world: World, changes: Changes) -> Any:
    """`/v1/models` with an Authorization header: what is listed, or that nobody asks."""
    with httpx.Client(base_url=world.base_url) as client:
        return world.json(client.get("/v1/models", headers={"Authorization": changes["authorization"]}))
