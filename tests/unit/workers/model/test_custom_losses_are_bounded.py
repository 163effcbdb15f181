"""A graph of allowed names that costs too much, or cannot be known beforehand, is a quick error that names its node."""

from __future__ import annotations

import itertools
import resource
import time
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from app.custom_losses.graph import encode
from app.errors import InvalidRequest
from app.wire.types import Datum
from tests.unit.app.custom_losses.test_uploads_are_checked import INPUTS, LP, OUTPUT, SUM, W, node, ref
from workers.model.custom_loss import compile_loss
from workers.model.custom_loss_ops import FUNCTIONS, METHODS

MEMORY_SLACK = 128 * 2**20


def loss_of(*calls: dict[str, Any], tail: tuple[dict[str, Any], ...] = (SUM, OUTPUT)) -> Any:
    return compile_loss(encode("mine", INPUTS, {"format": 1, "nodes": [LP, W, *calls, *tail]}))


def datum(n: int = 8) -> Datum:
    tokens = np.zeros(n, np.int32)
    return Datum(tokens, {"target_tokens": np.zeros(n, np.int64), "w": np.ones(n, np.float32)})


def function(name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return node("call_function", name, target, *args, **kwargs)


def method(name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return node("call_method", name, target, *args, **kwargs)


def doubling(count: int) -> list[dict[str, Any]]:
    names = ["w", *(f"c{i}" for i in range(count))]
    return [function(new, "torch.cat", [ref(old), ref(old)]) for old, new in itertools.pairwise(names)]


def diagonals(count: int) -> list[dict[str, Any]]:
    names = ["w", *(f"f{i}" for i in range(count))]
    pairs = [
        (function(f"d{new}", "torch.diag", ref(old)), method(new, "flatten", ref(f"d{new}")))
        for old, new in itertools.pairwise(names)
    ]
    return [call for pair in pairs for call in pair]


HUGE, VALUES = "exceed", "depends on the values"
HOSTILE: dict[str, tuple[list[dict[str, Any]], str]] = {
    "expand": (
        [
            function("s", "operator.getitem", ref("w"), {"slice": [0, 1, None]}),
            method("bad", "expand", ref("s"), 10**12),
        ],
        HUGE,
    ),
    "repeat": ([method("bad", "repeat", ref("w"), 10**12)], HUGE),
    "tile": ([function("bad", "torch.tile", ref("w"), {"tuple": [10**12]})], HUGE),
    "repeat_interleave": ([function("bad", "torch.repeat_interleave", ref("w"), 10**12)], HUGE),
    "pad": ([function("bad", "torch.nn.functional.pad", ref("w"), {"tuple": [0, 10**12]})], HUGE),
    "diag of diag": (diagonals(4), HUGE),
    "cat again and again": (doubling(100), HUGE),
    "outer again and again": (
        [
            function("o", "torch.outer", ref("w"), ref("w")),
            method("f", "flatten", ref("o")),
            function("o2", "torch.outer", ref("f"), ref("f")),
            method("f2", "flatten", ref("o2")),
            function("bad", "torch.outer", ref("f2"), ref("f2")),
        ],
        HUGE,
    ),
    "many parts": ([method("r", "repeat", ref("w"), 100), method("bad", "unbind", ref("r"))], "parts"),
    "power of integers": (
        [
            function("n", "getattr", ref("w"), "shape"),
            function("i", "operator.getitem", ref("n"), 0),
            function("bad", "operator.pow", ref("i"), 10**9),
        ],
        "too large a power",
    ),
    "shift of integers": ([function("bad", "operator.lshift", 1, 10**12)], "too large a power or shift"),
    "squares of integers": ([function("b0", "operator.mul", 2**40, 2**40)], "too large an integer"),
    "repeated text": ([function("bad", "operator.mul", "sum", 10**12)], "take tensors and numbers"),
    "repeated list": ([function("bad", "operator.mul", [1], 10**12)], "take tensors and numbers"),
    "math on a tensor": ([function("bad", "math.exp", ref("w"))], "math functions take numbers"),
    "boolean index": (
        [function("m", "operator.gt", ref("w"), 0), function("bad", "operator.getitem", ref("w"), ref("m"))],
        VALUES,
    ),
    "where with one argument": (
        [function("m", "operator.gt", ref("w"), 0), function("bad", "torch.where", ref("m"))],
        VALUES,
    ),
    "slice by a tensor": (
        [
            method("i", "argmax", ref("w")),
            function("bad", "operator.getitem", ref("w"), {"slice": [None, ref("i"), None]}),
        ],
        VALUES,
    ),
    "repeat by a tensor": (
        [method("i", "long", ref("w")), function("bad", "torch.repeat_interleave", ref("w"), ref("i"))],
        VALUES,
    ),
    "truncating integer division": (
        [method("i", "long", ref("w")), function("bad", "torch.div", ref("i"), -1, rounding_mode="trunc")],
        "rounding mode",
    ),
    "shapes that do not fit": (
        [method("r", "repeat", ref("w"), 2), function("bad", "operator.add", ref("r"), ref("w"))],
        "broadcast",
    ),
    "values of a tensor": ([function("bad", "getattr", ref("w"), "values")], "attribute"),
    "unknown keyword": ([function("bad", "torch.exp", ref("w"), colour=1)], "colour"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_graph_is_a_quick_named_error(case: str) -> None:
    calls, words = HOSTILE[case]
    loss = loss_of(*calls)
    loss_of().check([datum()])  # whatever torch loads at first use
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        loss.check([datum()])
    assert time.monotonic() - begin < 3.0
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY_SLACK
    assert caught.value.detail.startswith("data[0]: loss 'mine', node '")
    assert words in caught.value.detail


def padding_by_length() -> Any:
    """Pads by 10¹², but only datums of nine tokens."""
    return loss_of(
        function("shape", "getattr", ref("w"), "shape"),
        function("n", "operator.getitem", ref("shape"), 0),
        function("nine", "operator.eq", ref("n"), 9),
        function("much", "operator.mul", ref("nine"), 10**12),
        function("bad", "torch.nn.functional.pad", ref("w"), {"tuple": [0, ref("much")]}),
    )


def test_datums_of_every_length_are_tried() -> None:
    loss = padding_by_length()
    loss.check([datum(8), datum(10)])
    with pytest.raises(InvalidRequest, match=r"data\[1\]: loss 'mine', node 'bad'.*exceed"):
        loss.check([datum(7), datum(9)])


def reduced(target: str, **kwargs: Any) -> Any:
    """A scalar, or a row, of all pairs of a datum's positions."""
    rows = function("rows", "torch.unsqueeze", ref("w"), 0)
    columns = function("columns", "torch.unsqueeze", ref("logprobs"), 1)
    pairs = function("pairs", target, ref("rows"), ref("columns"), **kwargs)
    total = function("total", "torch.sum", ref("pairs"))
    return loss_of(rows, columns, pairs, tail=(total, OUTPUT))


@pytest.mark.parametrize(
    ("target", "kwargs"),
    [
        *((f"torch.nn.functional.{name}_loss", {}) for name in ("mse", "l1", "smooth_l1", "huber", "poisson_nll")),
        ("torch.nn.functional.kl_div", {"reduction": "sum"}),
        ("torch.nn.functional.cosine_similarity", {"dim": 0}),
        ("torch.cosine_similarity", {"dim": 0}),
    ],
)
def test_what_is_broadcast_inside_of_a_node_is_counted_for_every_datum(target: str, kwargs: dict[str, Any]) -> None:
    loss = reduced(target, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch suspects a mistake
        loss.check([datum(2)])
        with pytest.raises(InvalidRequest, match=r"data\[1\]: loss 'mine', node 'pairs'.*exceed"):
            loss.check([datum(2), datum(20_000)])


def test_an_integer_divisor_that_only_some_lengths_have_is_noticed() -> None:
    """2 to the power of (n - 5) is a float below five tokens, an integer from there on."""
    loss = loss_of(
        method("n", "size", ref("w"), 0),
        function("power", "operator.sub", ref("n"), 5),
        function("divisor", "operator.pow", 2, ref("power")),
        method("i", "long", ref("w")),
        function("bad", "torch.div", ref("i"), ref("divisor"), rounding_mode="trunc"),
    )
    loss.check([datum(4)])
    with pytest.raises(InvalidRequest, match=r"data\[1\]: loss 'mine', node 'bad'.*rounding mode"):
        loss.check([datum(4), datum(5)])


def outputs(loss: Any, metrics: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return SUM, node("output", "output", "output", {"tuple": [loss, {"dict": metrics}]})


@pytest.mark.parametrize(
    ("calls", "tail", "words"),
    [
        ([], outputs(ref("w"), {}), "must be a scalar tensor, not [8]"),
        ([method("n", "numel", ref("w"))], outputs(ref("n"), {}), "must be a scalar tensor, not int"),
        ([], outputs(ref("total"), {"custom/a:sum": ref("w")}), "metric 'custom/a:sum' must be a scalar"),
        ([method("v", "sum", ref("w"))], outputs(ref("v"), {}), "does not depend on logprobs"),
        ([method("d", "detach", ref("logprobs")), method("v", "sum", ref("d"))], outputs(ref("v"), {}), "not depend"),
    ],
)
def test_an_output_that_is_no_loss_is_an_error_of_the_output(calls: Any, tail: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        loss_of(*calls, tail=tail).check([datum()])
    assert caught.value.detail.startswith("data[0]: loss 'mine', output: ")
    assert words in caught.value.detail


def test_the_operations_of_a_whole_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.custom_losses.allowed.MAX_BATCH_OPERATIONS", 1000)
    loss = loss_of(*[function(f"e{i}", "torch.exp", ref("w")) for i in range(9)])
    loss.check([datum()] * 5)
    with pytest.raises(InvalidRequest, match=r"data\[\d+\]: with it the operations of loss 'mine' exceed"):
        loss.check([datum()] * 50)


def test_an_in_place_operator_leaves_the_datums_own_arrays() -> None:
    loss = loss_of(function("a", "operator.iadd", ref("w"), 1.0))
    example = datum()
    loss.evaluate(torch.zeros(8), example, "data[0]")
    assert (example.inputs["w"] == 1).all()


def test_tables_hold_callables_for_all_that_is_allowed() -> None:
    from app.custom_losses import allowed

    assert set(FUNCTIONS) == allowed.FUNCTIONS and set(METHODS) == set(allowed.METHODS)
    assert all(callable(each) for each in (*FUNCTIONS.values(), *METHODS.values()))
