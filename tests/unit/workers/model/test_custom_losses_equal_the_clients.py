"""A loss traced by the SDK and run here gives what the SDK's own evaluation gives: value, gradient, metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import orjson
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.lib.public_interfaces.custom_loss import LossHandle, encode_graph, run_loss_handle, trace_loss
from torch import Tensor

from app.custom_losses import allowed
from app.custom_losses.graph import encode
from app.errors import InvalidRequest
from app.wire.types import Datum, ForwardBackwardOutput
from tests.unit.workers.model import model_reference as reference
from workers.model.base import BaseModel
from workers.model.custom_loss import CustomLoss, compile_loss
from workers.model.forward import Work, run_pass

Returned = tuple[Tensor, Mapping[str, Tensor]]


def traced(function: Callable[..., Returned], **ranks: int) -> LossHandle:
    return trace_loss(function, ranks, "session")  # type: ignore[arg-type]


def uploaded(handle: LossHandle) -> CustomLoss:
    """What the worker makes of the bytes that the SDK sends."""
    inputs = orjson.loads(orjson.dumps([each.model_dump() for each in handle.inputs]))
    return compile_loss(encode(handle.name, inputs, orjson.loads(orjson.dumps(encode_graph(handle).model_dump()))))


def random_datum(seed: int, handle: LossHandle, n: int, k: int | None) -> tuple[Datum, types.Datum, Tensor]:
    draw = np.random.default_rng(seed)
    wide = (n,) if k is None else (n, k)
    arrays: dict[str, np.ndarray] = {"target_tokens": draw.integers(0, 9, wide)}
    for each in handle.inputs[1:]:
        shape = [(), (n,), (n, k or 3)][each.rank]
        arrays.setdefault(each.name, np.asarray(draw.normal(size=shape), np.float32))
    tokens = draw.integers(0, 9, n).astype(np.int32)
    theirs = types.Datum(
        model_input=types.ModelInput.from_ints(tokens.tolist()),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in arrays.items()},
    )
    mine = {name: array.reshape(1) if array.ndim == 0 else array for name, array in arrays.items()}
    return Datum(tokens, mine), theirs, torch.from_numpy(-draw.exponential(size=wide).astype(np.float32) - 0.01)


def assert_equal_to_the_client(handle: LossHandle, seed: int, k: int | None = None) -> None:
    loss = uploaded(handle)
    made = [random_datum(seed + i, handle, n, k) for i, n in enumerate((7, 1, 12))]
    leaves = [lp.clone().requires_grad_() for _, _, lp in made]
    total, metrics = run_loss_handle(handle, [theirs for _, theirs, _ in made], leaves)
    total.backward()
    loss.check([datum for datum, _, _ in made])
    found = [loss.evaluate(lp, datum, "data") for datum, _, lp in made]
    for mine, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(mine.grad, leaf.grad, atol=1e-5, rtol=1e-5, equal_nan=True)
    named = loss.metrics(torch.stack([each.sums for each in found]), len(found))
    expected = {"loss:sum": float(total.detach())} | metrics
    assert named.keys() == expected.keys()
    for key, value in expected.items():
        assert named[key] == pytest.approx(value, rel=1e-5, abs=1e-5, nan_ok=True)


def neg_ll(logprobs: Tensor, weights: Tensor) -> Returned:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/neg_ll:sum": loss}


def ppo_like(logprobs: Tensor, q: Tensor, advantages: Tensor) -> Returned:
    ratio = torch.exp(logprobs - q)
    bounded = torch.clamp(ratio, 0.8, 1.2)
    loss = -torch.minimum(ratio * advantages, bounded * advantages).sum()
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/clipped:mean": (ratio != bounded).float().mean()}


def many_shapes(logprobs: Tensor, beta: Tensor, w: Tensor) -> Returned:
    n = logprobs.shape[0]
    padded = F.pad(logprobs, (0, 2), value=-1.0)
    windows = torch.stack([padded[:-2], padded[1:-1], padded[2:]], dim=1)
    smooth = windows.softmax(-1).max(dim=1).values
    parts = torch.cat([logprobs, w.detach()]).view(2, n)
    loss = (smooth * beta).sum() / math.sqrt(n) + parts.T.logsumexp(dim=0).sum() + F.softplus(w * logprobs).mean()
    return loss, {"custom/length:sum": torch.ones_like(w).sum(), "custom/a/b.c-d:mean": smooth.mean()}


def in_double(logprobs: Tensor, w: Tensor) -> Returned:
    wide = logprobs.to(torch.float64) + torch.zeros_like(w, dtype=torch.float64, device=w.device)
    masked = torch.where(w > 0, wide, float("-inf"))
    return torch.logsumexp(masked.masked_fill(w < -9, float("inf")), 0) + wide.sum(), {}


def integers(logprobs: Tensor, target_tokens: Tensor) -> Returned:
    scale = (target_tokens % 3).float() + (target_tokens == 2)
    picked = torch.gather(logprobs, 0, target_tokens.clamp(max=0))
    loss = (logprobs * scale).sum() + picked.norm() + abs(logprobs).pow(2).sum() ** 0.5
    loss += 1
    return loss, {"custom/n:sum": target_tokens.numel() * torch.ones_like(loss)}


@pytest.mark.parametrize(
    ("function", "ranks"),
    [
        (neg_ll, {"weights": 1}),
        (ppo_like, {"q": 1, "advantages": 1}),
        (many_shapes, {"beta": 0, "w": 1}),
        (in_double, {"w": 1}),
        (integers, {"target_tokens": 1}),
    ],
)
def test_a_loss_equals_the_clients_evaluation(function: Callable[..., Returned], ranks: dict[str, int]) -> None:
    assert_equal_to_the_client(traced(function, logprobs=1, **ranks), 1)


def distribution(logprobs: Tensor, target_distribution: Tensor) -> Returned:
    q = target_distribution.softmax(-1)
    loss = (logprobs.exp() * (logprobs - q.log())).sum(dim=-1).mean() + F.kl_div(logprobs, q, reduction="batchmean")
    return loss, {"custom/entropy:mean": -(q * q.log()).sum(-1).mean()}


def test_a_loss_on_several_targets_equals_the_clients_evaluation() -> None:
    assert_equal_to_the_client(traced(distribution, logprobs=2, target_distribution=2), 3, k=4)


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.exp,
    torch.tanh,
    torch.abs,
    torch.square,
    torch.sigmoid,
    torch.neg,
    torch.sin,
    F.softplus,
    F.relu,
    F.logsigmoid,
    F.gelu,
    torch.special.expit,
    torch.log1p,
    lambda x: x.cumsum(0),
    lambda x: x.flip(0),
    lambda x: x.softmax(0),
    lambda x: x.clamp(-1, 1),
    lambda x: x[: x.shape[0]],
    lambda x: x.sort().values,
    lambda x: x / (1 + x.detach().abs()),
    lambda x: 2 - x,
    lambda x: x - x.mean(),
    lambda x: x.unsqueeze(1).squeeze(1),
    lambda x: x.expand(3, -1).mean(0),
    lambda x: torch.roll(x, 1, 0),
    lambda x: x**2,
    lambda x: x.double().float(),
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.mul,
    torch.maximum,
    torch.minimum,
    torch.logaddexp,
    lambda x, y: x - y,
    lambda x, y: x / (y * y + 1),
    lambda x, y: torch.where(x > y, x, y * 0.5),
    lambda x, y: torch.stack([x, y]).mean(0),
    lambda x, y: torch.outer(x, y).mean(1),
    lambda x, y: x.masked_fill(y < 0, 0.25),
    lambda x, y: torch.lerp(x, y, 0.3),
]
REDUCE: list[Callable[[Tensor], Tensor]] = [
    torch.sum,
    torch.mean,
    lambda x: x.logsumexp(0),
    lambda x: x.square().mean().sqrt(),
    lambda x: x.max() + x.sum(),
    lambda x: torch.dot(x, x),
    lambda x: x.norm(),
    lambda x: x.sum() / math.sqrt(x.shape[0]),
]


@settings(max_examples=60)
@given(st.data(), st.integers(0, 2**20))
def test_any_graph_of_allowed_operations_equals_the_clients_evaluation(data: st.DataObject, seed: int) -> None:
    steps = data.draw(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9), st.integers(0, 9)), max_size=12))
    reduce = data.draw(st.sampled_from(REDUCE))

    def loss(logprobs: Any, w: Any) -> Returned:
        values = [logprobs, w]
        for choice, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            operation: Any = (UNARY + BINARY)[choice % len(UNARY + BINARY)]
            values.append(torch.tanh(operation(a, b) if operation in BINARY else operation(a)))
        total = reduce(values[-1]) + reduce(logprobs * 0.1)
        return total, {"custom/last:mean": values[-1].mean(), "custom/all:sum": total}

    assert_equal_to_the_client(traced(loss, logprobs=1, w=1), seed)


def test_a_pass_with_a_custom_loss_equals_the_same_loss_built_in(qwen: BaseModel) -> None:
    loss = uploaded(traced(neg_ll, logprobs=1, weights=1))
    for k in (None, 3):
        if k is not None:
            loss = uploaded(traced(neg_ll, logprobs=2, weights=2))
        data = reference.random_data(1, [6, 13, 2], k)
        built_in = Work(reference.random_adapter(qwen, 1), data, "cross_entropy")
        custom = Work(reference.random_adapter(qwen, 1), data, "custom", {"loss_id": "l"}, True, loss)
        expected, output = run_pass(qwen, [built_in, custom], micro_batch_tokens=16)
        assert isinstance(expected, ForwardBackwardOutput) and isinstance(output, ForwardBackwardOutput), output
        assert output.metrics["loss:sum"] == pytest.approx(expected.metrics["loss:sum"], rel=1e-5)
        assert output.metrics["custom/neg_ll:sum"] == pytest.approx(output.metrics["loss:sum"])
        torch.testing.assert_close(custom.adapter.grad_flat, built_in.adapter.grad_flat, atol=1e-5, rtol=1e-5)


def bad_index(logprobs: Tensor, w: Tensor) -> Returned:
    return logprobs[w.long()].sum(), {}


@pytest.mark.parametrize("pending", [False, True])
def test_a_datum_whose_values_the_loss_cannot_take_fails_its_own_request(qwen: BaseModel, pending: bool) -> None:
    loss = uploaded(traced(bad_index, logprobs=1, w=1))
    data = [
        Datum(np.arange(3, dtype=np.int32), {"target_tokens": np.arange(3), "w": np.float32([0, 1, i])}) for i in (2, 9)
    ]
    bad = Work(reference.random_adapter(qwen, 1), data, "custom", {"loss_id": "l"}, True, loss)
    good = Work(reference.random_adapter(qwen, 1), data[:1], "custom", {"loss_id": "l"}, True, loss)
    if pending:
        run_pass(qwen, [Work(bad.adapter, data[:1], "custom", {"loss_id": "l"}, True, loss)], micro_batch_tokens=64)
    before = bad.adapter.grad_flat.clone()
    failure, output = run_pass(qwen, [bad, good], micro_batch_tokens=64)
    assert isinstance(failure, InvalidRequest)
    assert failure.detail.startswith("data[1]: loss 'bad_index', node 'getitem' (operator.getitem): index 9 is out")
    assert isinstance(output, ForwardBackwardOutput) and good.adapter.grad_flat.any()
    assert torch.equal(bad.adapter.grad_flat, before)


def test_every_allowed_function_goes_by_the_name_that_the_sdk_sends() -> None:
    from torch.fx.node import _get_qualified_name

    modules = [
        (torch, allowed.TORCH_FUNCTIONS),
        (F, allowed.FUNCTIONAL_FUNCTIONS),
        (torch.special, allowed.SPECIAL_FUNCTIONS),
        (math, allowed.MATH_FUNCTIONS),
    ]
    sent = {_get_qualified_name(getattr(module, name)) for module, names in modules for name in names}
    assert sent <= allowed.FUNCTIONS
