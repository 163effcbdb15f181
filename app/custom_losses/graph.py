"""A custom loss as data: an uploaded torch.fx graph, checked node by node without torch (WIRE §2.7, SEMANTICS §4).

Parsing is the static half of the checks: names against `allowed`, references to earlier nodes only (so a graph cannot
loop), bounds on every size that the text alone decides. What a graph does with tensors of given shapes is the worker's
half: `workers.model.custom_loss`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.custom_losses import allowed
from app.errors import InvalidRequest

METRIC_KEY = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_INPUT_NAME = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_FLOATS = ("inf", "-inf", "nan")
_OPS = ("placeholder", "call_function", "call_method", "output")


@dataclass(frozen=True, slots=True)
class LossInput:
    """An input of a loss: `logprobs`, or a key of `loss_fn_inputs`. `rank` 0: a scalar; 1: [N]; 2: [N, K]."""

    name: str
    rank: int


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier node."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """`kind` dtype, device, layout or memory_format; `text` its name without `torch.`."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Node:
    """One step. `args` and `kwargs` hold Python literals, `Ref`s and `TorchConstant`s, nested in lists, tuples, dicts
    and slices."""

    op: str
    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class LossGraph:
    """A checked loss. `nodes`: the calls, in order, without placeholders and output. `loss`: the node whose value is
    the datum's loss. `metrics`: key → node. `placeholders`: the nodes that hold the inputs, in their order."""

    name: str
    inputs: tuple[LossInput, ...]
    placeholders: tuple[str, ...]
    nodes: tuple[Node, ...]
    loss: str
    metrics: Mapping[str, str]


def encode(name: str, inputs: object, graph: object) -> str:
    """A loss as canonical JSON text, which `parse` reads. Raises InvalidRequest if that is too long."""
    try:
        text = orjson.dumps({"name": name, "inputs": inputs, "graph": graph}, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError as error:
        raise InvalidRequest("graph: its values are nested too deeply") from error
    if len(text) > allowed.MAX_GRAPH_BYTES:
        raise InvalidRequest(f"graph: {len(text)} bytes exceed the limit of {allowed.MAX_GRAPH_BYTES}")
    return text.decode()


def parse(text: str) -> LossGraph:
    """Check a loss that `encode` wrote. Raises InvalidRequest, naming the node."""
    data: dict[str, Any] = orjson.loads(text)
    inputs = _inputs(data["inputs"])
    nodes = _node_list(data["graph"])
    placeholders: list[str] = []
    calls: list[Node] = []
    known: set[str] = set()
    for i, raw in enumerate(nodes[:-1]):
        where, op, name, target = _head(i, raw)
        if name in known:
            raise InvalidRequest(f"{where}.name: an earlier node has it already")
        if op == "placeholder":
            if calls or len(placeholders) == len(inputs) or target != inputs[len(placeholders)].name:
                raise InvalidRequest(f"{where}: the placeholders must be the inputs, in their order, before all else")
            placeholders.append(name)
        elif op == "output":
            raise InvalidRequest(f"{where}.op: only the last node can be the output")
        else:
            calls.append(_call(where, op, name, target, raw, known))
        known.add(name)
    if len(placeholders) < len(inputs):
        raise InvalidRequest(f"graph.nodes: input {inputs[len(placeholders)].name!r} has no placeholder")
    loss, metrics = _output(len(nodes) - 1, nodes[-1], known)
    return LossGraph(data["name"], inputs, tuple(placeholders), tuple(calls), loss, metrics)


def _inputs(raw: Any) -> tuple[LossInput, ...]:
    if not isinstance(raw, list) or not 1 <= len(raw) <= allowed.MAX_INPUTS:
        raise InvalidRequest(f"inputs: must be a list of 1 to {allowed.MAX_INPUTS} inputs, logprobs first")
    inputs = []
    for i, each in enumerate(raw):
        if not isinstance(each, dict) or each.keys() != {"name", "rank"}:
            raise InvalidRequest(f"inputs[{i}]: must have name and rank, and nothing else")
        name, rank = each["name"], each["rank"]
        if not isinstance(name, str) or not _INPUT_NAME.fullmatch(name):
            raise InvalidRequest(f"inputs[{i}].name: must be a lowercase name of letters, digits and underscores")
        if type(rank) is not int or rank not in (0, 1, 2):
            raise InvalidRequest(f"inputs[{i}].rank: must be 0, 1 or 2")
        inputs.append(LossInput(name, rank))
    if inputs[0].name != "logprobs" or inputs[0].rank == 0:
        raise InvalidRequest("inputs[0]: must be logprobs, of rank 1 or 2")
    if len({each.name for each in inputs}) < len(inputs):
        raise InvalidRequest("inputs: two have the same name")
    return tuple(inputs)


def _node_list(graph: Any) -> list[Any]:
    if not isinstance(graph, dict) or graph.keys() != {"format", "nodes"}:
        raise InvalidRequest("graph: must have format and nodes, and nothing else")
    if graph["format"] != allowed.FORMAT or isinstance(graph["format"], bool):
        raise InvalidRequest(f"graph.format: only {allowed.FORMAT} is supported")
    nodes = graph["nodes"]
    if not isinstance(nodes, list) or not nodes:
        raise InvalidRequest("graph.nodes: must be a list of nodes")
    if len(nodes) > allowed.MAX_NODES:
        raise InvalidRequest(f"graph.nodes: {len(nodes)} nodes exceed the limit of {allowed.MAX_NODES}")
    return nodes


def _head(i: int, raw: Any) -> tuple[str, str, str, str]:
    """Where a node is, its op, name and target."""
    where = f"graph.nodes[{i}]"
    if not isinstance(raw, dict) or raw.keys() - {"op", "name", "target", "args", "kwargs"}:
        raise InvalidRequest(f"{where}: must be an object of op, name, target, args and kwargs")
    for field in ("op", "name", "target"):
        if not isinstance(raw.get(field), str) or not 0 < len(raw[field]) <= allowed.MAX_NAME_CHARACTERS:
            raise InvalidRequest(f"{where}.{field}: missing or not a name")
    where = f"{where} ({raw['name']!r})"
    if raw["op"] not in _OPS:
        raise InvalidRequest(f"{where}.op: {raw['op']!r} is not allowed in a custom loss")
    return where, raw["op"], raw["name"], raw["target"]


def _call(where: str, op: str, name: str, target: str, raw: dict[str, Any], known: set[str]) -> Node:
    names = allowed.FUNCTIONS if op == "call_function" else allowed.METHODS
    if target not in names:
        what = "function" if op == "call_function" else "tensor method"
        raise InvalidRequest(f"{where}.target: {what} {target!r} is not allowed in a custom loss")
    args, kwargs = raw.get("args", []), raw.get("kwargs", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise InvalidRequest(f"{where}: args must be a list and kwargs an object")
    given = {key for key, value in kwargs.items() if value is not None and value is not False}
    if odd := given & allowed.REFUSED_KEYWORDS:
        raise InvalidRequest(f"{where}.kwargs[{min(odd)!r}]: is not allowed in a custom loss")
    if target in allowed.GETATTR_NAMES:
        return _attribute(where, name, args, kwargs, known)
    decoded = _items(args, f"{where}.args", known, 0)
    named = {key: _decode(value, f"{where}.kwargs[{key!r}]", known, 0) for key, value in kwargs.items()}
    if op == "call_method" and not (decoded and isinstance(decoded[0], Ref)):
        raise InvalidRequest(f"{where}.args[0]: a method is called on a node")
    return Node(op, name, target, tuple(decoded), named)


def _attribute(where: str, name: str, args: list[Any], kwargs: dict[str, Any], known: set[str]) -> Node:
    if len(args) != 2 or kwargs or args[1] not in allowed.ATTRIBUTES:
        wanted = ", ".join(allowed.ATTRIBUTES)
        found = args[1] if len(args) > 1 else None
        raise InvalidRequest(f"{where}: attribute {found!r} is not allowed in a custom loss, only {wanted}")
    owner = _decode(args[0], f"{where}.args[0]", known, 0)
    if not isinstance(owner, Ref):
        raise InvalidRequest(f"{where}.args[0]: only a node has attributes")
    return Node("call_function", name, "getattr", (owner, args[1]), {})


def _output(i: int, raw: Any, known: set[str]) -> tuple[str, dict[str, str]]:
    where, op, _, _ = _head(i, raw)
    if op != "output":
        raise InvalidRequest(f"{where}.op: the last node must be the output")
    args = raw.get("args", [])
    decoded = _decode(args[0], f"{where}.args[0]", known, 0) if isinstance(args, list) and len(args) == 1 else None
    if not isinstance(decoded, list | tuple) or len(decoded) != 2 or not isinstance(decoded[1], dict):
        raise InvalidRequest(f"{where}.args: must be the pair of a loss and a dict of metrics")
    loss, metrics = decoded
    if not isinstance(loss, Ref):
        raise InvalidRequest(f"{where}: the loss must be the value of a node")
    for key, value in metrics.items():
        if not METRIC_KEY.fullmatch(key) or not isinstance(value, Ref):
            raise InvalidRequest(f"{where}: metric {key!r} must be a node named custom/<name>:sum or :mean, lowercase")
    return loss.name, {key: value.name for key, value in metrics.items()}


def _items(raw: Sequence[Any], where: str, known: set[str], depth: int) -> list[Any]:
    if len(raw) > allowed.MAX_LITERAL_ITEMS:
        raise InvalidRequest(f"{where}: {len(raw)} entries exceed the limit of {allowed.MAX_LITERAL_ITEMS}")
    return [_decode(each, f"{where}[{i}]", known, depth) for i, each in enumerate(raw)]


def _decode(raw: Any, where: str, known: set[str], depth: int) -> Any:
    """An encoded argument as Python value. `depth`: how deep in lists and objects it lies."""
    if depth > allowed.MAX_LITERAL_DEPTH:
        raise InvalidRequest(f"{where}: is nested too deeply")
    if raw is None or isinstance(raw, bool | float):
        return raw
    if isinstance(raw, int):
        if abs(raw) > allowed.MAX_INTEGER:
            raise InvalidRequest(f"{where}: {raw} is too large a number")
        return raw
    if isinstance(raw, str):
        if raw not in allowed.STRINGS:
            raise InvalidRequest(f"{where}: text {raw[:60]!r} is not allowed in a custom loss")
        return raw
    if isinstance(raw, list):
        return _items(raw, where, known, depth + 1)
    if isinstance(raw, dict) and len(raw) == 1:
        ((kind, value),) = raw.items()
        return _decode_object(kind, value, where, known, depth + 1)
    raise InvalidRequest(f"{where}: is no encoded argument")


def _decode_object(kind: str, value: Any, where: str, known: set[str], depth: int) -> Any:
    if kind == "ref" and isinstance(value, str):
        if value not in known:
            raise InvalidRequest(f"{where}: {value[:60]!r} is not an earlier node")
        return Ref(value)
    if kind == "tuple" and isinstance(value, list):
        return tuple(_items(value, where, known, depth))
    if kind == "dict" and isinstance(value, dict):
        if len(value) > allowed.MAX_LITERAL_ITEMS:
            raise InvalidRequest(f"{where}: {len(value)} entries exceed the limit of {allowed.MAX_LITERAL_ITEMS}")
        return {key: _decode(each, f"{where}[{key[:60]!r}]", known, depth) for key, each in value.items()}
    if kind == "slice" and isinstance(value, list) and len(value) == 3:
        return slice(*_items(value, where, known, depth))
    if kind == "ellipsis" and value is True:
        return Ellipsis
    if kind == "float" and value in _FLOATS:
        return float(value)
    if kind in allowed.CONSTANTS and isinstance(value, str):
        names = allowed.CONSTANTS[kind]
        if names is not None and value not in names:
            raise InvalidRequest(f"{where}: {kind} {value[:60]!r} is not allowed in a custom loss")
        return TorchConstant(kind, value)
    raise InvalidRequest(f"{where}: is no encoded argument")
