"""No body over the limit reaches a route, whichever way it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import httpx
import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel

from app.body_limit import BodyLimit

LIMIT = 1000


class Text(BaseModel):
    """A body that FastAPI reads itself."""

    text: str


def service() -> FastAPI:
    app = FastAPI()

    @app.post("/raw")
    async def raw(request: Request) -> int:
        return len(await request.body())

    @app.post("/model")
    async def model(body: Text) -> int:
        return len(body.text)

    app.add_middleware(BodyLimit, limit=LIMIT)
    return app


def post(path: str, body: bytes | Iterable[bytes], **headers: str) -> httpx.Response:
    async def stream() -> AsyncIterator[bytes]:
        for part in body:
            assert isinstance(part, bytes)
            yield part

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(service())
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            content = body if isinstance(body, bytes) else stream()
            return await client.post(path, content=content, headers={"content-type": "application/json", **headers})

    return asyncio.run(send())


@pytest.mark.parametrize("path", ["/raw", "/model"])
def test_a_body_that_says_it_is_too_long_is_refused(path: str) -> None:
    answer = post(path, bytes(LIMIT + 1))
    assert answer.status_code == 413
    assert str(LIMIT) in answer.json()["detail"]
    assert answer.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize("path", ["/raw", "/model"])
def test_a_body_that_grows_too_long_is_refused(path: str) -> None:
    answer = post(path, [bytes(300)] * 4)
    assert answer.status_code == 413
    assert str(LIMIT) in answer.json()["detail"]


def test_no_more_is_read_than_the_limit_and_one_part() -> None:
    read = 0

    def endless() -> Iterable[bytes]:
        nonlocal read
        while True:
            read += 100
            assert read <= LIMIT + 100
            yield bytes(100)

    assert post("/raw", endless()).status_code == 413


@pytest.mark.parametrize("in_parts", [False, True])
def test_a_body_of_exactly_the_limit_is_taken(in_parts: bool) -> None:
    answer = post("/raw", [bytes(LIMIT // 4)] * 4 if in_parts else bytes(LIMIT))
    assert (answer.status_code, answer.json()) == (200, LIMIT)


def test_a_length_that_lies_does_not_get_past() -> None:
    assert post("/raw", [bytes(LIMIT + 1)], **{"content-length": "10"}).status_code == 413
