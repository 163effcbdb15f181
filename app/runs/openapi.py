"""What the OpenAPI document says of bodies that routes read themselves, so that bad input can become a failed future.

The document then shows at /docs what those routes take, and whoever generates requests from it reaches all of them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

_NUMBERS: dict[str, Any] = {"type": "array", "items": {"type": "number"}}
_INTEGERS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}


def json_body_of(*schemas: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route whose JSON body is one of `schemas`."""
    forms = [_inlined(schema.model_json_schema()) for schema in schemas]
    return _body({"application/json": forms[0] if len(forms) == 1 else {"anyOf": forms}})


def batch_body(name: str, *, protobuf: bool) -> dict[str, Any]:
    """`openapi_extra` of a route that takes a batch: as JSON below the field `name`, and as the `protobuf` message
    `ForwardBackwardRequest` (WIRE §4.2, §11), each perhaps zstd-compressed."""
    tensor = _object(
        required={"data": _NUMBERS, "dtype": {"enum": ["float32", "int64"]}},
        optional={"shape": _INTEGERS, "sparse_crow_indices": _INTEGERS, "sparse_col_indices": _INTEGERS},
    )
    chunk = _object(required={"tokens": _INTEGERS}, optional={"type": {"const": "encoded_text"}})
    datum = _object(
        required={
            "model_input": _object(required={"chunks": {"type": "array", "items": chunk}}),
            "loss_fn_inputs": {"type": "object", "additionalProperties": tensor},
        }
    )
    config = {"type": "object", "additionalProperties": {"type": ["number", "string"]}}
    batch = _object(
        required={"data": {"type": "array", "minItems": 1, "items": datum}, "loss_fn": {"type": "string"}},
        optional={"loss_fn_config": config},
    )
    place = {"model_id": {"type": "string"}, "seq_id": {"type": "integer", "minimum": 1}}
    content = {"application/json": _object(required=place | {name: batch})}
    if protobuf:
        content["application/x-protobuf"] = {"type": "string", "format": "binary"}
    return _body(content)


def _body(content: dict[str, dict[str, Any]]) -> dict[str, Any]:
    media = {media_type: {"schema": schema} for media_type, schema in content.items()}
    return {"requestBody": {"required": True, "content": media}}


def _object(*, required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    properties = required | (optional or {})
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """`schema` without references, which in an OpenAPI document would mean another place. Ours are not recursive."""
    definitions: dict[str, Any] = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, list):
            return [resolve(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return resolve(definitions[value["$ref"].rpartition("/")[2]])
        return {key: resolve(item) for key, item in value.items()}

    inlined: dict[str, Any] = resolve(schema)
    return inlined
