"""Custom losses: an uploaded graph rebuilt from tables, tried on meta tensors, and evaluated datum by datum.

`app.custom_losses.graph` has checked the graph's text. Here a dry run on meta tensors of a datum's shapes decides
before anything is computed whether the datum can have this loss: shapes that depend on values cannot be had on meta
tensors, and results are counted before they exist (SEMANTICS §4). The first of its kind is tried thoroughly, forward
and backward, with every operation inside of others metered; datums that differ from it in length alone, forward and
node by node.

The evaluation itself is on the CPU wherever the model is: a datum's log-probabilities are few, the result is the same
as a client's own, and an index out of range is an error there, where on a GPU it would end the process.

N: tokens of a datum. K: targets per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from app.custom_losses import allowed
from app.custom_losses.graph import LossGraph, Node, Ref, TorchConstant, parse
from app.errors import InvalidRequest
from app.wire.types import Datum
from workers.model import custom_loss_ops as ops

_CPU, _META = torch.device("cpu"), torch.device("meta")
_COMPILED = 256
_KNOWN_SHAPES = 4096
_BACKWARD_FACTOR = 4
"""How much more than its forward pass the backward pass may make and cost."""
_MESSAGE_CHARACTERS = 300

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class DatumLoss(NamedTuple):
    """One datum's loss. `grad`: d loss / d logprobs, like the log-probabilities. `sums`: float64 [1 + metrics]."""

    grad: Tensor
    sums: Tensor


class CustomLoss:
    """A rebuilt loss. Knows which shapes it has tried. `text`: what `graph` was parsed from."""

    def __init__(self, graph: LossGraph, text: str) -> None:
        self.graph = graph
        self.text = text
        self._steps = [(node, _callee(node)) for node in graph.nodes]
        self._tried: dict[Shapes, int | str] = {}
        self._kinds: set[Shapes] = set()
        self._hides_work = any(node.target.rpartition(".")[2] in ops.HIDING_NAMES for node in graph.nodes)

    def check(self, data: Sequence[Datum]) -> None:
        """Raise InvalidRequest if this loss cannot be had of these datums, naming the datum and the node. They have
        the inputs that the loss declares."""
        total = 0
        for i, datum in enumerate(data):
            total += self._try(self._shapes(datum), f"data[{i}]")
            if total > allowed.MAX_BATCH_OPERATIONS:
                limit = f"{allowed.MAX_BATCH_OPERATIONS:.0e}"
                raise InvalidRequest(
                    f"data[{i}]: with it the operations of {self._name} exceed {limit} for one request"
                )

    def evaluate(self, logprobs: Tensor, datum: Datum, where: str) -> DatumLoss:
        """The loss at `logprobs` [N] or [N, K] (float32, on the CPU). Raises InvalidRequest, beginning with `where`."""
        leaf = logprobs.detach().clone().requires_grad_()
        arrays = [torch.tensor(each) for each in self._arrays(datum)]
        with torch.enable_grad():
            loss, metrics = self._run([leaf, *arrays], _CPU, where)
            grad = self._gradient(loss, leaf, where)
        scalars = [float(each.detach()) if isinstance(each, Tensor) else float(each) for each in (loss, *metrics)]
        sums = torch.tensor(scalars, dtype=torch.float64)
        return DatumLoss(grad, sums)

    def metrics(self, sums: Tensor, n_datums: int) -> dict[str, float]:
        """Metrics of a request of `n_datums` from the `sums` [parts, 1 + metrics] of its micro-batches."""
        value, *totals = sums.sum(0).tolist()
        metrics = {"loss:sum": value}
        for key, total in zip(self.graph.metrics, totals, strict=True):
            metrics[key] = total / n_datums if key.endswith(":mean") else total
        return metrics

    @property
    def _name(self) -> str:
        return f"loss {self.graph.name!r}"

    def _arrays(self, datum: Datum) -> list[np.ndarray]:
        inputs = self.graph.inputs[1:]
        return [datum.inputs[each.name].reshape(()) if each.rank == 0 else datum.inputs[each.name] for each in inputs]

    def _shapes(self, datum: Datum) -> Shapes:
        logprobs = (tuple(datum.inputs["target_tokens"].shape), torch.float32)
        return (
            logprobs,
            *((a.shape, torch.int64 if a.dtype.kind == "i" else torch.float32) for a in self._arrays(datum)),
        )

    def _try(self, shapes: Shapes, where: str) -> int:
        """The element operations of a datum of these shapes. Raises InvalidRequest."""
        known = self._tried.get(shapes)
        if known is None:
            if len(self._tried) >= _KNOWN_SHAPES:
                self._tried.clear()
            kind = tuple((shape[1:], dtype) for shape, dtype in shapes)
            try:
                if kind in self._kinds and not self._hides_work:
                    known = self._count(shapes)
                else:
                    known = self._dry_run(shapes)
                    self._kinds.add(kind)
            except InvalidRequest as error:
                known = error.detail
            self._tried[shapes] = known
        if isinstance(known, str):
            raise InvalidRequest(f"{where}: {known}")
        return known

    def _count(self, shapes: Shapes) -> int:
        """The element operations, by the sizes of the nodes' results alone. Raises InvalidRequest."""
        counter = ops.Counter(max_bytes=allowed.MAX_OUTPUT_BYTES)
        with torch.no_grad():
            self._run([torch.empty(shape, dtype=dtype, device=_META) for shape, dtype in shapes], _META, "", counter)
        return (1 + _BACKWARD_FACTOR) * counter.elements

    def _dry_run(self, shapes: Shapes) -> int:
        """The element operations, of everything. Raises InvalidRequest."""
        tensors = [torch.empty(shape, dtype=dtype, device=_META) for shape, dtype in shapes]
        leaf = tensors[0].requires_grad_()
        bounds = {"max_bytes": allowed.MAX_OUTPUT_BYTES, "max_operations": allowed.MAX_ELEMENT_OPERATIONS}
        with torch.enable_grad():
            with ops.Meter(**bounds) as forward:
                loss, _ = self._run(tensors, _META, "")
            with ops.Meter(**{name: _BACKWARD_FACTOR * bound for name, bound in bounds.items()}) as backward:
                self._gradient(loss, leaf, "")
        total: int = forward.operations + backward.operations
        return total

    def _run(
        self, inputs: Sequence[Tensor], device: torch.device, where: str, counter: ops.Counter | None = None
    ) -> tuple[Tensor, list[Any]]:
        """Loss and metrics, all of them scalars."""
        values: dict[str, Any] = dict(zip(self.graph.placeholders, inputs, strict=True))
        for node, call in self._steps:
            try:
                args = [_resolve(each, values, device) for each in node.args]
                kwargs = {key: _resolve(each, values, device) for key, each in node.kwargs.items()}
                value = call(*args, **kwargs)
                ops.check_value(value)
                if counter is not None:
                    counter.add(value)
            except Exception as error:
                raise self._failure(f"node {node.name!r} ({node.target})", error, where) from error
            values[node.name] = value
        loss = values[self.graph.loss]
        if not isinstance(loss, Tensor) or loss.ndim != 0:
            shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise self._failure("output", ops.Refused(f"the loss must be a scalar tensor, not {shape}"), where)
        metrics = [values[name] for name in self.graph.metrics.values()]
        for key, metric in zip(self.graph.metrics, metrics, strict=True):
            if not (metric.numel() == 1 if isinstance(metric, Tensor) else isinstance(metric, int | float)):
                raise self._failure("output", ops.Refused(f"metric {key!r} must be a scalar"), where)
        return loss, metrics

    def _gradient(self, loss: Tensor, leaf: Tensor, where: str) -> Tensor:
        try:
            if not loss.requires_grad:
                raise ops.Refused("the loss does not depend on logprobs")
            (grad,) = torch.autograd.grad(loss, leaf, allow_unused=True)
            if grad is None:
                raise ops.Refused("the loss does not depend on logprobs")
        except Exception as error:
            raise self._failure("output", error, where) from error
        return grad

    def _failure(self, what: str, error: Exception, where: str) -> InvalidRequest:
        text = str(error).partition("\n")[0][:_MESSAGE_CHARACTERS]
        if isinstance(error, NotImplementedError) or "meta tensor" in text.lower():
            text = "its shape or its value in Python depends on the values of tensors"
        prefix = f"{where}: " if where else ""
        return InvalidRequest(f"{prefix}{self._name}, {what}: {text}")


@lru_cache(maxsize=_COMPILED)
def compile_loss(text: str) -> CustomLoss:
    """The loss that an operation's body carries. Raises InvalidRequest."""
    return CustomLoss(parse(text), text)


def _callee(node: Node) -> ops.Operation:
    return ops.METHODS[node.target] if node.op == "call_method" else ops.FUNCTIONS[node.target]


def _resolve(value: Any, values: Mapping[str, Any], device: torch.device) -> Any:
    """An argument with the values of the nodes that it refers to."""
    if isinstance(value, Ref):
        return values[value.name]
    if isinstance(value, TorchConstant):
        return device if value.kind == "device" else _CONSTANTS[value.kind][value.text]
    if isinstance(value, tuple):
        return tuple(_resolve(each, values, device) for each in value)
    if isinstance(value, list):
        return [_resolve(each, values, device) for each in value]
    if isinstance(value, dict):
        return {key: _resolve(each, values, device) for key, each in value.items()}
    if isinstance(value, slice):
        return slice(*(_resolve(each, values, device) for each in (value.start, value.stop, value.step)))
    return value


_CONSTANTS: Mapping[str, Mapping[str, Any]] = {
    "dtype": ops.DTYPES,
    "layout": ops.LAYOUTS,
    "memory_format": ops.MEMORY_FORMATS,
}
