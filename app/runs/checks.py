"""What only the model decides about a `forward_backward`: token range, context length, the loss's inputs and shapes.

The API asks before it accepts, the worker again before it computes. Every message names the datum's index and the
field, and says what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from app.custom_losses.allowed import MAX_BATCH_NODES
from app.custom_losses.graph import LossGraph, LossInput
from app.errors import InvalidRequest
from app.runs.loss_specs import CUSTOM, LOSS_SPECS, LossSpec
from app.wire.types import Datum, LossConfig

MAX_TARGETS_PER_TOKEN = 1024
"""Largest K of [N, K] targets."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a base model takes: token ids below `vocab_size`, at most `context_length` tokens."""

    vocab_size: int
    context_length: int


def check_batch(loss_fn: str, loss_config: LossConfig, data: Sequence[Datum], limits: Limits) -> None:
    """Raise InvalidRequest for the first thing that the model or the loss cannot take (SEMANTICS §2, §3)."""
    spec = _loss(loss_fn)
    _check_config(loss_config, spec)
    if not data:
        raise InvalidRequest("data: must hold at least one datum")
    names = set(data[0].inputs)
    for i, datum in enumerate(data):
        where = f"data[{i}]"
        _check_datum(datum, where, spec, limits)
        if odd := set(datum.inputs) ^ names:
            raise InvalidRequest(f"{where}.loss_fn_inputs[{min(odd)!r}]: must be in every datum or in none")


def check_custom_batch(loss_config: LossConfig, data: Sequence[Datum], limits: Limits, graph: LossGraph) -> None:
    """`check_batch` for a custom loss: every datum has what the upload declares, of its rank (WIRE §2.7). Inputs that
    the loss does not read are the client's own business."""
    if odd := sorted(set(loss_config) - {"loss_id"}):
        raise InvalidRequest(f"loss_fn_config[{odd[0]!r}]: unknown to custom; it takes loss_id")
    if not data:
        raise InvalidRequest("data: must hold at least one datum")
    if len(graph.nodes) * len(data) > MAX_BATCH_NODES:
        raise InvalidRequest(f"data: {len(data)} datums are too many for a loss of {len(graph.nodes)} nodes")
    logprobs, *inputs = graph.inputs
    spec = LossSpec(CUSTOM, ("target_tokens",), two_dimensional=True)
    for i, datum in enumerate(data):
        where = f"data[{i}]"
        _check_tokens(datum, where, limits)
        if "target_tokens" not in datum.inputs:
            raise InvalidRequest(f"{where}.loss_fn_inputs['target_tokens']: missing; custom needs it")
        targets = datum.inputs["target_tokens"]
        _check_targets(targets, f"{where}.loss_fn_inputs['target_tokens']", len(datum.tokens), spec, limits)
        if targets.ndim != logprobs.rank:
            ranks = f"has rank {targets.ndim}, loss {graph.name!r} declares logprobs with rank {logprobs.rank}"
            raise InvalidRequest(f"{where}.loss_fn_inputs['target_tokens']: {ranks}")
        for each in inputs:
            _check_declared(datum, where, each, graph.name)


def _check_declared(datum: Datum, where: str, declared: LossInput, loss: str) -> None:
    field = f"{where}.loss_fn_inputs[{declared.name!r}]"
    array = datum.inputs.get(declared.name)
    if array is None:
        raise InvalidRequest(f"{field}: missing; loss {loss!r} takes it")
    rank = 0 if declared.rank == 0 and array.shape == (1,) else array.ndim  # a scalar comes without a shape
    if rank != declared.rank:
        raise InvalidRequest(f"{field}: has rank {rank}, loss {loss!r} declares it with rank {declared.rank}")
    if rank and len(array) != len(datum.tokens):
        n = len(datum.tokens)
        expected = f"[{n}]" if rank == 1 else f"[{n}, K]"
        raise InvalidRequest(f"{field}: has shape {list(array.shape)}, expected {expected} like the model_input")


def _loss(name: str) -> LossSpec:
    spec = LOSS_SPECS.get(name)
    if spec is None:
        supported = ", ".join(sorted((*LOSS_SPECS, CUSTOM)))
        raise InvalidRequest(f"loss_fn: {name!r} is not supported; supported are {supported}")
    return spec


def _check_config(config: LossConfig, spec: LossSpec) -> None:
    for key, value in config.items():
        if key not in spec.config:
            known = ", ".join(sorted(spec.config)) or "none"
            raise InvalidRequest(f"loss_fn_config[{key!r}]: unknown to {spec.name}; it takes {known}")
        if not isinstance(value, float) or not math.isfinite(value):
            raise InvalidRequest(f"loss_fn_config[{key!r}]: must be a finite number")


def _check_datum(datum: Datum, where: str, spec: LossSpec, limits: Limits) -> None:
    _check_tokens(datum, where, limits)
    n = len(datum.tokens)
    for name in datum.inputs:
        if name not in spec.required and name not in spec.optional:
            known = ", ".join(spec.required + spec.optional)
            raise InvalidRequest(f"{where}.loss_fn_inputs[{name!r}]: unknown to {spec.name}; it takes {known}")
    for name in spec.required:
        if name not in datum.inputs:
            raise InvalidRequest(f"{where}.loss_fn_inputs[{name!r}]: missing; {spec.name} needs it")
    targets = datum.inputs["target_tokens"]
    _check_targets(targets, f"{where}.loss_fn_inputs['target_tokens']", n, spec, limits)
    for name, array in datum.inputs.items():
        if array.shape != targets.shape:
            shapes = f"has shape {list(array.shape)}, target_tokens has {list(targets.shape)}"
            raise InvalidRequest(f"{where}.loss_fn_inputs[{name!r}]: {shapes}")
    if spec.provenance and not datum.loss_fn_input_spans:
        raise InvalidRequest(f"{where}.loss_fn_input_spans: missing; {spec.name} needs provenance on every datum")


def _check_tokens(datum: Datum, where: str, limits: Limits) -> None:
    n = len(datum.tokens)
    if n == 0:
        raise InvalidRequest(f"{where}.model_input: has no tokens")
    if n > limits.context_length:
        raise InvalidRequest(f"{where}.model_input: {n} tokens exceed the context of {limits.context_length}")
    _check_range(datum.tokens, f"{where}.model_input", limits)


def _check_targets(targets: np.ndarray, field: str, n: int, spec: LossSpec, limits: Limits) -> None:
    dimensions = (1, 2) if spec.two_dimensional else (1,)
    if targets.ndim not in dimensions or len(targets) != n or 0 in targets.shape:
        expected = f"[{n}] or [{n}, K]" if spec.two_dimensional else f"[{n}]"
        raise InvalidRequest(f"{field}: has shape {list(targets.shape)}, expected {expected} like the model_input")
    if targets.ndim == 2 and targets.shape[1] > MAX_TARGETS_PER_TOKEN:
        raise InvalidRequest(
            f"{field}: {targets.shape[1]} targets per token exceed the limit of {MAX_TARGETS_PER_TOKEN}"
        )
    if targets.dtype.kind != "i":
        raise InvalidRequest(f"{field}: must be int64")
    _check_range(targets, field, limits)


def _check_range(tokens: np.ndarray, field: str, limits: Limits) -> None:
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise InvalidRequest(f"{field}: token {bad} is outside the vocabulary of {limits.vocab_size}")
