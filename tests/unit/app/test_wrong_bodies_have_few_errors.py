"""A body of many wrong values is refused for a few of them: each error takes memory and time, and only one is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import app.main  # so that all schemas are known
from app.schemas import LenientRequest, Request

MANY, FEW = 2000, 10


def schemas(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in kind.__subclasses__():
        yield each
        yield from schemas(each)


FIELDS = sorted(
    {
        (f"{schema.__module__}.{schema.__qualname__}.{name}", schema, name)
        for base in (Request, LenientRequest)
        for schema in schemas(base)
        for name in schema.model_fields
        if schema.__module__.startswith(app.__name__)
    },
    key=lambda found: found[0],
)
WRONG: dict[str, Any] = {
    "nulls": [None] * MANY,
    "numbers": [-5] * MANY,
    "objects": [{}] * MANY,
    "named numbers": {f"name{i}": i for i in range(MANY)},
}


def errors(schema: type[BaseModel], body: dict[str, Any]) -> int:
    try:
        schema.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(("schema", "name"), [pytest.param(*rest, id=identity) for identity, *rest in FIELDS])
def test_a_field_of_many_wrong_values(schema: type[BaseModel], name: str) -> None:
    others = errors(schema, {})
    for values in WRONG.values():
        assert errors(schema, {name: values}) <= others + FEW


@pytest.mark.parametrize("schema", [pytest.param(schema, id=schema.__qualname__) for schema in schemas(Request)])
def test_many_unknown_fields(schema: type[BaseModel]) -> None:
    assert errors(schema, {f"name{i}": i for i in range(MANY)}) <= FEW
