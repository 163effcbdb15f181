"""What only the model decides about a `forward_backward`: token range, context length, the loss's inputs and shapes.

Every message names the datum's index and the field, and says what was expected.
"""

from __future__ import annotations

import math

import numpy as np

from app.errors import InvalidRequest
from app.fleet.service import ServedModel
from app.runs.loss_specs import LOSS_SPECS, LossSpec
from app.wire.types import Datum, ForwardBackward


def check_forward_backward(request: ForwardBackward, model: ServedModel) -> None:
    """Raise InvalidRequest for the first thing that the model or the loss cannot take."""
    spec = _loss(request.loss_fn)
    _check_config(request, spec)
    if not request.data:
        raise InvalidRequest("data: must hold at least one datum")
    for i, datum in enumerate(request.data):
        _check_datum(datum, f"data[{i}]", spec, model)


def _loss(name: str) -> LossSpec:
    spec = LOSS_SPECS.get(name)
    if spec is None:
        raise InvalidRequest(f"loss_fn: {name!r} is not supported; supported are {', '.join(sorted(LOSS_SPECS))}")
    return spec


def _check_config(request: ForwardBackward, spec: LossSpec) -> None:
    for key, value in request.loss_config.items():
        if key not in spec.config:
            known = ", ".join(sorted(spec.config)) or "none"
            raise InvalidRequest(f"loss_fn_config[{key!r}]: unknown to {spec.name}; it takes {known}")
        if not isinstance(value, float) or not math.isfinite(value):
            raise InvalidRequest(f"loss_fn_config[{key!r}]: must be a finite number")


def _check_datum(datum: Datum, where: str, spec: LossSpec, model: ServedModel) -> None:
    n = len(datum.tokens)
    if n == 0:
        raise InvalidRequest(f"{where}.model_input: has no tokens")
    if n > model.context_length:
        raise InvalidRequest(f"{where}.model_input: {n} tokens exceed the context of {model.context_length}")
    _check_range(datum.tokens, f"{where}.model_input", model)
    for name in spec.required:
        if name not in datum.inputs:
            raise InvalidRequest(f"{where}.loss_fn_inputs[{name!r}]: missing; {spec.name} needs it")
    targets = datum.inputs["target_tokens"]
    for name, array in datum.inputs.items():
        field = f"{where}.loss_fn_inputs[{name!r}]"
        if name not in spec.required and name not in spec.optional:
            raise InvalidRequest(
                f"{field}: unknown to {spec.name}; it takes {', '.join(spec.required + spec.optional)}"
            )
        if array.ndim not in ((1, 2) if spec.two_dimensional else (1,)) or len(array) != n or 0 in array.shape:
            expected = f"[{n}] or [{n}, K]" if spec.two_dimensional else f"[{n}]"
            raise InvalidRequest(f"{field}: has shape {list(array.shape)}, expected {expected} like the model_input")
        if name == "target_tokens":
            if array.dtype.kind != "i":
                raise InvalidRequest(f"{field}: must be int64")
            _check_range(array, field, model)
        elif array.shape != targets.shape:
            raise InvalidRequest(f"{field}: has shape {list(array.shape)}, target_tokens has {list(targets.shape)}")


def _check_range(tokens: np.ndarray, field: str, model: ServedModel) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= model.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(f"{field}: token {bad} is outside the vocabulary of {model.vocab_size}")
