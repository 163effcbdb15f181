"""What the nodes of a custom loss call: tables made of `app.custom_losses.allowed`, and what a dry run may cost.

A graph never names an attribute to look up: its targets are keys of these tables. Functions on plain numbers are
guarded, since Python's numbers, unlike tensors, have no size that is known beforehand.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.custom_losses import allowed

Operation = Callable[..., Any]
_MAX_SHIFT = 64
_SORTS = frozenset({"sort", "argsort", "topk", "kthvalue", "median", "nanmedian", "mode", "msort"})
_SORT_COST = 32
_REDUCED_LOSSES = frozenset(each for each in allowed.FUNCTIONAL_FUNCTIONS if each.endswith(("_loss", "_div")))
HIDING_NAMES = (
    frozenset({"matmul", "mm", "bmm", "mv", "inner", "cosine_similarity", "trapezoid"})
    | frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})
    | _REDUCED_LOSSES
    | _SORTS
)
"""Nodes whose cost their result does not show: they multiply, sort, or reduce what they have broadcast first."""
_PRODUCTS = frozenset({"mm", "bmm", "mv", "addmm", "baddbmm", "addmv"})


class TooExpensive(Exception):
    """A dry run has exceeded its bounds."""


class Refused(Exception):
    """A value or an operation that a custom loss may not have, whatever its names."""


def _on_numbers(function: Operation) -> Operation:
    """`math` functions: on numbers, never on a tensor, whose value they would read."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not all(isinstance(each, int | float) for each in (*args, *kwargs.values())):
            raise Refused("math functions take numbers, tensors have torch functions")
        return function(*args, **kwargs)

    return call


def _on_tensors_and_numbers(function: Operation) -> Operation:
    def call(*args: Any) -> Any:
        if not all(isinstance(each, Tensor | int | float) for each in args):
            raise Refused("operators take tensors and numbers")
        return function(*args)

    return call


def _add(left: Any, right: Any) -> Any:
    """`+`, of shapes too."""
    if isinstance(left, tuple) and isinstance(right, tuple):
        return (*left, *right)
    return _plain_add(left, right)


def _growing(function: Operation) -> Operation:
    """`**` and `<<`: two small integers may give one that fills the memory."""

    def call(left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int) and abs(right) > _MAX_SHIFT:
            raise Refused(f"{right} is too large a power or shift of an integer")
        return function(left, right)

    return call


def _dividing(function: Operation) -> Operation:
    """Division, of integers only exactly: rounded, the least integer by -1 ends the process."""

    def call(*args: Any, rounding_mode: str | None = None, **kwargs: Any) -> Any:
        numbers = [*args, *kwargs.values()]
        if rounding_mode is not None and not any(_is_floating(each) for each in numbers):
            raise Refused("integer division with a rounding mode is not allowed; use floor_divide")
        return function(*args, rounding_mode=rounding_mode, **kwargs)

    return call


def _is_floating(value: Any) -> bool:
    return value.is_floating_point() if isinstance(value, Tensor) else isinstance(value, float)


def _getitem(owner: Any, index: Any) -> Any:
    if isinstance(owner, Tensor) or (isinstance(owner, tuple | list) and isinstance(index, int | slice)):
        return owner[index]
    raise Refused("only tensors, shapes and results with several parts have items")


def _getattr(owner: Any, name: str) -> Any:
    table = _TENSOR_ATTRIBUTES if isinstance(owner, Tensor) else _RESULT_ATTRIBUTES
    if name not in table or not isinstance(owner, Tensor | tuple):
        raise Refused(f"a {type(owner).__name__} has no attribute {name!r} here")
    return table[name](owner)


_TENSOR_ATTRIBUTES = {name: operator.attrgetter(name) for name in allowed.TENSOR_ATTRIBUTES}
_RESULT_ATTRIBUTES = {name: operator.attrgetter(name) for name in allowed.RESULT_ATTRIBUTES}
_OPERATORS = {name: _on_tensors_and_numbers(getattr(operator, name)) for name in allowed.OPERATOR_FUNCTIONS}
_plain_add = _OPERATORS["add"]
_OPERATORS |= {"add": _add, "getitem": _getitem}
_OPERATORS |= {name: _growing(_OPERATORS[name]) for name in ("pow", "ipow", "lshift")}

_DIVISIONS = ("div", "divide")

METHODS: Mapping[str, Operation] = {
    **{name: getattr(Tensor, name) for name in allowed.METHODS},
    **{name: _dividing(getattr(Tensor, name)) for name in _DIVISIONS},
}
"""By `target` of a `call_method` node."""

FUNCTIONS: Mapping[str, Operation] = {
    **{f"torch.{name}": getattr(torch, name) for name in allowed.TORCH_FUNCTIONS},
    **{f"torch.nn.functional.{name}": getattr(torch.nn.functional, name) for name in allowed.FUNCTIONAL_FUNCTIONS},
    **{f"torch.special.{name}": getattr(torch.special, name) for name in allowed.SPECIAL_FUNCTIONS},
    **{f"torch._C._special.special_{name}": getattr(torch.special, name) for name in allowed.SPECIAL_FUNCTIONS},
    **{f"torch.{name}": _dividing(getattr(torch, name)) for name in _DIVISIONS},
    **{f"torch.Tensor.{name}": method for name, method in METHODS.items()},
    **{name: getattr(torch, own) for name, own in allowed.TORCH_ALIASES.items()},
    **{name: getattr(torch.nn.functional, own) for name, own in allowed.FUNCTIONAL_ALIASES.items()},
    **{f"math.{name}": _on_numbers(getattr(math, name)) for name in allowed.MATH_FUNCTIONS},
    **{f"operator.{name}": function for name, function in _OPERATORS.items()},
    **dict.fromkeys(allowed.GETATTR_NAMES, _getattr),
}
"""By `target` of a `call_function` node."""

DTYPES = {name: getattr(torch, name) for name in allowed.CONSTANTS["dtype"] or ()}
LAYOUTS = {"strided": torch.strided}
MEMORY_FORMATS = {name: getattr(torch, name) for name in allowed.CONSTANTS["memory_format"] or ()}


def check_value(value: Any) -> None:
    """Raise Refused if a node's value is nothing that a loss may have."""
    if isinstance(value, Tensor | bool | float | torch.dtype | torch.device | torch.Size):
        return
    if isinstance(value, int):
        if abs(value) > allowed.MAX_INTEGER:
            raise Refused("its value is too large an integer")
    elif isinstance(value, tuple | list):
        if len(value) > allowed.MAX_PARTS:
            raise Refused(f"its result has {len(value)} parts, more than {allowed.MAX_PARTS}")
        for part in value:
            check_value(part)
    else:
        raise Refused(f"its value is a {type(value).__name__}")


class Counter:
    """Adds up the results of nodes. `elements`: so far."""

    def __init__(self, *, max_bytes: int) -> None:
        self._max_bytes = self._bytes_left = max_bytes
        self.elements = 0

    def add(self, value: Any) -> None:
        """Count a node's value. Raises TooExpensive."""
        for each in _flat(value):
            if isinstance(each, Tensor):
                self.elements += each.numel()
                self._bytes_left -= each.numel() * each.element_size()
        if self._bytes_left < 0:
            raise TooExpensive(f"the results up to it exceed {self._max_bytes} bytes")


class Meter(TorchDispatchMode):
    """Adds up what every operation under it makes and costs, those inside of others and in the backward pass too.

    On meta tensors nothing is computed or allocated, so a bound is noticed before it costs anything. `operations`: so
    far.
    """

    def __init__(self, *, max_bytes: int, max_operations: int) -> None:
        super().__init__()
        self._bytes_left = max_bytes
        self._max_operations = max_operations
        self._max_bytes = max_bytes
        self.operations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0].removeprefix("aten::")
        results = func(*args, **kwargs)
        made = [each for each in _flat(results) if isinstance(each, Tensor)]
        self._bytes_left -= sum(each.numel() * each.element_size() for each in made)
        if self._bytes_left < 0:
            raise TooExpensive(f"the results up to it exceed {self._max_bytes} bytes")
        taken = [each for each in _flat(args) if isinstance(each, Tensor)]
        self.operations += _cost(name, taken, made)
        if self.operations > self._max_operations:
            raise TooExpensive(f"the operations on elements up to it exceed {self._max_operations:.0e}")
        return results


def _flat(value: Any) -> list[Any]:
    return [each for part in value for each in _flat(part)] if isinstance(value, tuple | list) else [value]


def _cost(name: str, taken: list[Tensor], made: list[Tensor]) -> int:
    size = max((each.numel() for each in (*taken, *made)), default=0)
    if name in _PRODUCTS:
        return 2 * made[0].numel() * taken[-2].shape[-1]
    return size * _SORT_COST if name in _SORTS else size
