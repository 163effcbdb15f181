"""Every field that a request can have, found by looking: at the official SDK's models, at the protobuf messages, at the
service's own schemas and routes. What appears in one of them appears here, so that somebody has to say what it does.

A field is named `<where>.<field>`: where is a model of the SDK, `proto <message>`, a schema of the service that has no
counterpart in the SDK, or, for queries, headers and paths, `<METHOD> <route>`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
import tinker
from google.protobuf.descriptor import Descriptor
from tinker import types as sdk_types
from tinker.proto import tinker_public_pb2 as sdk_pb

import app
from app.compat.schemas import NEUTRAL
from app.runs.loss_specs import LOSS_SPECS
from app.schemas import LenientRequest, Request
from app.wire import tinker_pb2 as own_pb

COUNTERPARTS: Mapping[str, str] = {
    "AccessibleSessions": "AccessibleSearchOwner",
    "AdamStep": "AdamParams",
    "ClientVersion": "ClientConfigRequest",
    "CopyWeights": "CopyWeightsRequest",
    "CreateCustomLoss": "CreateCustomLossRequest",
    "CreateFromWeights": "LoadWeightsRequest",
    "CreateModel": "CreateModelRequest",
    "CreateSamplingSession": "CreateSamplingSessionRequest",
    "CreateSession": "CreateSessionRequest",
    "DimuonStep": "DimuonParams",
    "FuturesTarget": "SamplingSessionFuturesTarget",
    "GetInfo": "GetInfoRequest",
    "Heartbeat": "SessionHeartbeatRequest",
    "JoinSamplingSession": "JoinSamplingSessionRequest",
    "LoadWeights": "LoadWeightsRequest",
    "Lora": "LoraConfig",
    "OfClientFinished": "ClientFinishedSessionStatusQuery",
    "OfStatus": "ActiveSessionStatusQuery",
    "OptimStep": "OptimStepRequest",
    "OptimizerConfig": "DimuonOptimizerConfig",
    "OtherOptimStep": "OptimStepRequest",
    "OwnSessions": "OwnSearchOwner",
    "Params": "SamplingParams",
    "Prompt": "ModelInput",
    "RetrieveFuture": "FutureRetrieveRequest",
    "RetrieveFutures": "FuturesRetrieveRequest",
    "Sample": "SampleRequest",
    "SaveWeights": "SaveWeightsRequest",
    "SaveWeightsExternal": "SaveWeightsExternalRequest",
    "SaveWeightsForSampler": "SaveWeightsForSamplerRequest",
    "SearchCursor": "SessionSearchCursor",
    "SearchSessions": "SessionSearchRequest",
    "SessionsOfUsers": "UserSearchOwner",
    "Telemetry": "TelemetrySendRequest",
    "TextChunk": "EncodedTextChunk",
    "TokenMatrix": "TensorData",
    "UnloadModel": "UnloadModelRequest",
}
"""The service's schema → the SDK's model of the same thing."""

_MODULES = [importlib.import_module(m.name) for m in pkgutil.walk_packages(sdk_types.__path__, "tinker.types.")]
_NAMES = {name: value for module in _MODULES for name, value in vars(module).items() if not name.startswith("_")}


def sdk_fields() -> set[str]:
    """Fields of the SDK's request models and of everything that they hold."""
    classes = {c for module in _MODULES for c in vars(module).values() if inspect.isclass(c) and _is_model(c)}
    pending = [c for c in classes if c.__name__.endswith("Request")]
    seen: set[type] = set()
    while pending:
        model = pending.pop()
        if model in seen:
            continue
        seen.add(model)
        for annotation in _fields_of(model).values():
            pending.extend(_models_in(annotation))
        if issubclass(model, pydantic.BaseModel) and model.model_config.get("extra") == "allow":
            pending.extend(model.__subclasses__())  # an open union: its members are told apart by `type`
    return {f"{model.__name__}.{name}" for model in seen for name in _fields_of(model)}


def _is_model(c: type) -> bool:
    return c.__module__.split(".")[0] == "tinker" and (issubclass(c, pydantic.BaseModel) or dataclasses.is_dataclass(c))


def _fields_of(model: type) -> dict[str, Any]:
    if issubclass(model, pydantic.BaseModel):
        return {name: field.annotation for name, field in model.model_fields.items()}
    hints = typing.get_type_hints(model, localns=_NAMES)
    return {field.name: hints[field.name] for field in dataclasses.fields(model) if not field.name.startswith("_")}


def _models_in(annotation: Any) -> Iterator[type]:
    if inspect.isclass(annotation) and (issubclass(annotation, pydantic.BaseModel) or _is_model(annotation)):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _models_in(part)


def proto_fields() -> set[str]:
    """Fields of `ForwardBackwardRequest` and of the messages in it, the SDK's and the service's."""
    return {
        f"proto {message.name}.{field.name}"
        for root in (sdk_pb.ForwardBackwardRequest.DESCRIPTOR, own_pb.ForwardBackwardRequest.DESCRIPTOR)
        for message in _messages(root)
        for field in message.fields
    }


def loss_fields() -> set[str]:
    """Inputs and configuration of each loss function."""
    return {
        f"{loss} {kind}.{name}"
        for loss, spec in LOSS_SPECS.items()
        for kind, names in (("input", (*spec.required, *spec.optional)), ("config", spec.config))
        for name in names
    }


def _messages(root: Descriptor) -> Iterator[Descriptor]:
    seen, pending = set(), [root]
    while pending:
        message = pending.pop()
        if message.full_name in seen:
            continue
        seen.add(message.full_name)
        pending.extend(field.message_type for field in message.fields if field.message_type)
        if not message.GetOptions().map_entry:
            yield message


def own_fields() -> set[str]:
    """Fields of the service's own schemas, those with a counterpart under the SDK's name."""
    for module in pkgutil.walk_packages(app.__path__, "app."):
        if module.name.endswith("schemas") or module.name == "app.compat.messages":
            importlib.import_module(module.name)
    neutral = {f"NEUTRAL.{name}" for name in NEUTRAL}
    return neutral | {
        f"{COUNTERPARTS.get(model.__name__, model.__name__)}.{field.alias or name}"
        for root in (Request, LenientRequest)
        for model in _leaves(root)
        for name, field in model.model_fields.items()
    }


def _leaves(root: type[pydantic.BaseModel]) -> Iterator[type[pydantic.BaseModel]]:
    for model in root.__subclasses__():
        if model.__subclasses__():
            yield from _leaves(model)
        else:
            yield model


def parameters(openapi: Mapping[str, Any]) -> set[str]:
    """Queries, headers and parts of paths, of every route that the service says it has."""
    marks = {"query": "?{}", "header": " {}:", "path": ""}
    return {
        f"{method.upper()} {_short(path)}{marks[parameter['in']].format(parameter['name'])}"
        + (f" {{{parameter['name']}}}" if parameter["in"] == "path" else "")
        for path, methods in openapi["paths"].items()
        for method, route in methods.items()
        for parameter in route.get("parameters", ())
    }


def _short(path: str) -> str:
    return path.removeprefix("/api/v1/")


def hand_made() -> set[tuple[str, str]]:
    """Route and field of the bodies and queries that the SDK writes down as plain dicts; `*` stands for an id."""
    found = set()
    for file in Path(tinker.__file__).parent.rglob("*.py"):
        if not file.name.endswith("_test.py"):
            for call in ast.walk(ast.parse(file.read_text())):
                if isinstance(call, ast.Call) and call.args and (route := _route(call.args[0])):
                    found |= {(route, name) for name in _dict_keys(call)}
    return found


def _route(argument: ast.expr) -> str | None:
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        text = argument.value
    elif isinstance(argument, ast.JoinedStr):
        text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in argument.values)
    else:
        return None
    return _short(text) if text.startswith("/api/v1/") else None


def _dict_keys(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        if isinstance(keyword.value, ast.Dict) and keyword.arg in ("body", "options"):
            for key, value in zip(keyword.value.keys, keyword.value.values, strict=True):
                assert isinstance(key, ast.Constant)
                if keyword.arg == "body":
                    yield str(key.value)
                elif isinstance(value, ast.Dict):  # `params` of options
                    yield from (str(inner.value) for inner in value.keys if isinstance(inner, ast.Constant))


def bodies(openapi: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The JSON schemas of each route's body, by method and route; some have two."""
    found = {}
    for path, methods in openapi["paths"].items():
        for method, route in methods.items():
            content = route.get("requestBody", {}).get("content", {})
            if "application/json" in content:
                found[f"{method.upper()} {_short(path)}"] = list(_forms(openapi, content["application/json"]["schema"]))
    return found


def _forms(openapi: Mapping[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "$ref" in schema:
        schema = openapi["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        for form in schema["anyOf"]:
            yield from _forms(openapi, form)
    elif "properties" in schema or schema.get("type") == "object":
        yield schema


def known_to(openapi: Mapping[str, Any], route: str) -> set[str]:
    """Names that a route with `*` for ids takes in its body or its query."""
    like = re.compile(re.escape(route).replace(r"\*", r"[^?]+"))
    known = set()
    for name, forms in bodies(openapi).items():
        if like.fullmatch(name.partition(" ")[2]):
            known |= {field for form in forms for field in form.get("properties", ())}
    for name in parameters(openapi):
        path, mark, field = name.partition(" ")[2].partition("?")
        if mark and like.fullmatch(path):
            known.add(field)
    return known
