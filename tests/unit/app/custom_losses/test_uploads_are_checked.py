"""An uploaded graph is taken or refused by its text alone; a refusal names the node."""

from __future__ import annotations

from typing import Any

import pytest

from app.custom_losses import allowed
from app.custom_losses.graph import LossInput, Ref, encode, parse
from app.errors import InvalidRequest

INPUTS = [{"name": "logprobs", "rank": 1}, {"name": "w", "rank": 1}]


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


LP, W = node("placeholder", "logprobs", "logprobs"), node("placeholder", "w", "w")
SUM = node("call_method", "total", "sum", ref("logprobs"))
OUTPUT = node("output", "output", "output", {"tuple": [ref("total"), {"dict": {"custom/a:sum": ref("total")}}]})


def graph(*calls: Any, head: tuple[Any, ...] = (LP, W), tail: tuple[Any, ...] = (SUM, OUTPUT)) -> dict[str, Any]:
    return {"format": 1, "nodes": [*head, *calls, *tail]}


def refusal(data: Any, inputs: Any = INPUTS) -> str:
    with pytest.raises(InvalidRequest) as caught:
        parse(encode("mine", inputs, data))
    return caught.value.detail


def test_a_graph_is_read_with_its_arguments() -> None:
    call = node("call_function", "c", "torch.clamp", ref("w"), {"float": "-inf"}, max=2.5)
    index = node(
        "call_function", "i", "operator.getitem", ref("c"), {"tuple": [{"ellipsis": True}, {"slice": [0, None, 2]}]}
    )
    found = parse(encode("mine", INPUTS, graph(call, index)))
    assert found.inputs == (LossInput("logprobs", 1), LossInput("w", 1))
    assert found.nodes[0].args == (Ref("w"), float("-inf")) and found.nodes[0].kwargs == {"max": 2.5}
    assert found.nodes[1].args == (Ref("c"), (..., slice(0, None, 2)))
    assert (found.loss, found.metrics) == ("total", {"custom/a:sum": "total"})


ESCAPES = {
    "dunder attribute": node("call_function", "bad", "builtins.getattr", ref("w"), "__class__"),
    "data pointer": node("call_function", "bad", "getattr", ref("w"), "data_ptr"),
    "attribute by a node": node("call_function", "bad", "getattr", ref("w"), ref("w")),
    "attribute with a default": node("call_function", "bad", "getattr", ref("w"), "shape", None),
    "attribute of a literal": node("call_function", "bad", "getattr", "sum", "shape"),
    "torch.load": node("call_function", "bad", "torch.load", "sum"),
    "torch.ops": node("call_function", "bad", "torch.ops.aten.add", ref("w")),
    "os.system": node("call_function", "bad", "os.system", "sum"),
    "eval": node("call_function", "bad", "builtins.eval", "sum"),
    "numpy": node("call_method", "bad", "numpy", ref("w")),
    "item": node("call_method", "bad", "item", ref("w")),
    "set_default_dtype": node("call_function", "bad", "torch.set_default_dtype", {"dtype": "float64"}),
    "random": node("call_function", "bad", "torch.rand_like", ref("w")),
    "zeros": node("call_function", "bad", "torch.zeros", 10**12),
    "new_zeros": node("call_method", "bad", "new_zeros", ref("w"), 10**12),
    "in place": node("call_method", "bad", "add_", ref("w"), 1),
    "backward": node("call_method", "bad", "backward", ref("w")),
    "cuda": node("call_method", "bad", "cuda", ref("w")),
    "method of the class": node("call_method", "bad", "__reduce__", ref("w")),
    "dotted method": node("call_method", "bad", "sum.__globals__", ref("w")),
    "out": node("call_function", "bad", "torch.exp", ref("w"), out=ref("w")),
    "promised size": node("call_function", "bad", "torch.repeat_interleave", ref("w"), ref("w"), output_size=3),
    "module": node("call_module", "bad", "linear", ref("w")),
    "get_attr": node("get_attr", "bad", "_tensor_constant0"),
    "device by text": node("call_method", "bad", "to", ref("w"), "cuda:0"),
    "own node": node("call_function", "bad", "torch.exp", ref("bad")),
    "later node": node("call_function", "bad", "torch.exp", ref("total")),
    "unknown node": node("call_function", "bad", "torch.exp", ref("nowhere")),
    "method of a literal": node("call_method", "bad", "sum", 3),
    "huge integer": node("call_function", "bad", "operator.add", ref("w"), 2**60),
    "long list": node("call_function", "bad", "torch.cat", [ref("w")] * 65),
    "two kinds": node("call_function", "bad", "torch.exp", {"ref": "w", "tuple": []}),
    "unknown dtype": node("call_method", "bad", "to", ref("w"), {"dtype": "complex64"}),
    "second placeholder": node("placeholder", "bad", "w"),
    "output in the middle": node("output", "bad", "output", {"tuple": [ref("w"), {"dict": {}}]}),
}


@pytest.mark.parametrize("case", ESCAPES)
def test_what_is_not_allowed_is_refused_with_the_name_of_its_node(case: str) -> None:
    detail = refusal(graph(ESCAPES[case]))
    assert detail.startswith("graph.nodes[2] ('bad')")


def deep(depth: int) -> Any:
    value: Any = ref("w")
    for _ in range(depth):
        value = {"tuple": [value]}
    return value


MALFORMED = {
    "deep": (graph(node("call_function", "bad", "torch.cat", deep(20))), "nested too deeply"),
    "deeper than JSON is written": (graph(node("call_function", "bad", "torch.cat", deep(2000))), "nested too deeply"),
    "a million nodes": (graph(*[node("call_function", "n", "torch.exp", ref("w"))] * 10**6), "exceed the limit"),
    "too many nodes": (graph(*[{}] * 600), "nodes exceed the limit of 512"),
    "no nodes": ({"format": 1, "nodes": []}, "graph.nodes: must be a list"),
    "another format": ({"format": 2, "nodes": [LP]}, "graph.format: only 1"),
    "extra field": ({"format": 1, "nodes": [LP], "code": "x"}, "graph: must have format and nodes"),
    "no output": (graph(tail=(SUM,)), "the last node must be the output"),
    "missing placeholder": (graph(head=(LP,)), "input 'w' has no placeholder"),
    "placeholders in another order": (graph(head=(W, LP)), "graph.nodes[0] ('w')"),
    "same name twice": (graph(SUM), "an earlier node has it already"),
    "node is no object": (graph("exp"), "graph.nodes[2]: must be an object"),
    "node without a name": (graph({"op": "call_function", "target": "torch.exp"}), "graph.nodes[2].name"),
    "node with another field": (graph({**SUM, "code": "x"}), "graph.nodes[2]: must be an object of"),
    "loss alone": (graph(tail=(SUM, node("output", "output", "output", ref("total")))), "pair of a loss"),
    "metric with another name": (
        graph(tail=(SUM, node("output", "o", "output", {"tuple": [ref("total"), {"dict": {"loss:sum": ref("w")}}]}))),
        "metric 'loss:sum'",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_graph_that_is_none_is_refused_by_name(case: str) -> None:
    data, words = MALFORMED[case]
    assert words in refusal(data)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "inputs: must be a list of 1 to 16"),
        ([{"name": "w", "rank": 1}], "inputs[0]: must be logprobs"),
        ([{"name": "logprobs", "rank": 0}], "inputs[0]: must be logprobs"),
        ([*INPUTS, {"name": "w", "rank": 1}], "two have the same name"),
        ([*INPUTS, {"name": "W", "rank": 1}], "inputs[2].name"),
        ([*INPUTS, {"name": "x", "rank": 3}], "inputs[2].rank"),
        ([*INPUTS, {"name": "x", "rank": True}], "inputs[2].rank"),
        ([*INPUTS, {"name": "x"}], "inputs[2]: must have name and rank"),
    ],
)
def test_wrong_inputs_are_refused_by_name(inputs: Any, words: str) -> None:
    assert words in refusal(graph(), inputs)


def test_nothing_private_or_random_is_in_the_list() -> None:
    names = {name.rpartition(".")[2] for name in allowed.FUNCTIONS} | set(allowed.METHODS)
    assert not [name for name in names - {"and_", "or_"} if name.startswith("__") or name.endswith("_")]
    assert not [name for name in names if "rand" in name or "seed" in name or "drop" in name or name.startswith("new")]
