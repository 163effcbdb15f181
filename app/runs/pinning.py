"""What a `forward_backward` looks up when it is accepted, written into the operation's own body.

Afterwards the operation depends on nothing but its row: replay finds the same logprobs and the same graph whatever has
become of the samples and of the uploaded loss. The fingerprint is that of the request as it came.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from app.custom_losses.service import Found
from app.errors import InvalidRequest
from app.sampling.records import RecordedSequence
from app.wire import tinker_pb2 as pb
from app.wire.types import Datum, ProvenanceSpan

GRAPH_KEY = "graph"
"""Key of `loss_fn_config` under which a stored request has its custom loss. No client may send it."""
LOGPROB_TOLERANCE = 1e-3
"""How far a client's copy of a recorded logprob may be from the record."""


def pin_graph(message: pb.ForwardBackwardRequest, found: Found) -> pb.ForwardBackwardRequest:
    """The request with the custom loss that it names."""
    pinned = _copy(message)
    pinned.loss_fn_config_v2[GRAPH_KEY].text = found.text
    return pinned


def sequence_ids(data: Sequence[Datum]) -> set[str]:
    """The sequences that the spans of these datums name."""
    spans = (span for datum in data for span in (*datum.model_input_spans, *datum.loss_fn_input_spans))
    return {span.sequence_id for span in spans if span.length}


def pin_logprobs(
    message: pb.ForwardBackwardRequest, data: Sequence[Datum], recorded: Mapping[str, RecordedSequence]
) -> pb.ForwardBackwardRequest:
    """The request with the recorded logprob of every sampled target as its `logprobs`, 0 for other targets.

    `data`: its datums, each with both kinds of spans. Raises InvalidRequest if what a span claims is not so, naming
    datum and field: an unknown sequence, positions that it has not, tokens that differ, a sampled target that is not
    the next token of the model input, or an advantage or a logprob that contradicts the record.
    """
    pinned = _copy(message)
    for i, (datum, target) in enumerate(zip(data, pinned.data, strict=True)):
        logprobs_N = _recorded_logprobs(datum, f"data[{i}]", recorded)
        tensor = target.loss_fn_inputs["logprobs"]
        tensor.Clear()
        tensor.dtype, tensor.dense = pb.DTYPE_FLOAT32, logprobs_N.tobytes()
        tensor.shape.append(len(logprobs_N))
    return pinned


def _copy(message: pb.ForwardBackwardRequest) -> pb.ForwardBackwardRequest:
    copied = pb.ForwardBackwardRequest()
    copied.CopyFrom(message)
    return copied


def _recorded_logprobs(datum: Datum, where: str, recorded: Mapping[str, RecordedSequence]) -> np.ndarray:
    """float32 [N]."""
    targets_N = datum.inputs["target_tokens"]
    claims = _check_inputs(datum, f"{where}.model_input_spans", recorded)
    logprobs_N = np.zeros(len(targets_N), "<f4")
    start = 0
    for i, span in enumerate(datum.loss_fn_input_spans):
        stop, field = start + span.length, f"{where}.loss_fn_input_spans[{i}]"
        tokens = _claimed(span, field, recorded)
        if span.sampled and span.length:
            _check_tokens(targets_N[start:stop], tokens, field, "target_tokens", start)
            claims.check_next(span, start, field)
            sequence = recorded[span.sequence_id]
            logprobs_N[start:stop] = sequence.logprobs[span.offset : span.offset + span.length]
        start = stop
    _check_arrays(datum, where, logprobs_N)
    return logprobs_N


@dataclass(frozen=True, slots=True, eq=False)
class _InputClaims:
    """For each position of a model input [N] the sampled token that it claims to be: the number of its sequence among
    `names`, -1 for a prompt token, and the place among the sequence's sampled tokens."""

    names: Mapping[str, int]
    sequence_N: np.ndarray
    place_N: np.ndarray

    def check_next(self, span: ProvenanceSpan, start: int, field: str) -> None:
        """A sampled target at position i is the model's input at i + 1, so both must name the same sampled token."""
        following = slice(start + 1, start + 1 + span.length)
        sequence, place = self.sequence_N[following], self.place_N[following]
        own = self.names.get(span.sequence_id, -2)
        odd = np.flatnonzero((sequence != own) | (place != span.offset + np.arange(len(place))))
        if odd.size:
            i = start + int(odd[0])
            raise InvalidRequest(f"{field}: target {i} is not what model_input_spans say of input {i + 1}")


def _check_inputs(datum: Datum, where: str, recorded: Mapping[str, RecordedSequence]) -> _InputClaims:
    """Compare the model's input with the record."""
    names: dict[str, int] = {}
    n = len(datum.tokens)
    sequence_N, place_N = np.full(n, -1), np.zeros(n, np.int64)
    start = 0
    for i, span in enumerate(datum.model_input_spans):
        stop, field = start + span.length, f"{where}[{i}]"
        _check_tokens(datum.tokens[start:stop], _claimed(span, field, recorded), field, "model_input", start)
        if span.sampled:
            sequence_N[start:stop] = names.setdefault(span.sequence_id, len(names))
            place_N[start:stop] = span.offset + np.arange(span.length)
        start = stop
    return _InputClaims(names, sequence_N, place_N)


def _claimed(span: ProvenanceSpan, field: str, recorded: Mapping[str, RecordedSequence]) -> np.ndarray:
    """The tokens that a span claims its positions to be."""
    if not span.length:
        return np.empty(0, np.int32)
    sequence = recorded.get(span.sequence_id)
    if sequence is None:
        raise InvalidRequest(
            f"{field}.sequence_id: no sequence {span.sequence_id[:200]!r} of this session is on record; "
            "sample with record_stability_info=True"
        )
    tokens, what = (sequence.tokens, "sampled tokens") if span.sampled else (sequence.prompt, "prompt tokens")
    if span.offset + span.length > len(tokens):
        raise InvalidRequest(
            f"{field}: offset {span.offset} and length {span.length} exceed the {len(tokens)} {what} of the sequence"
        )
    return tokens[span.offset : span.offset + span.length]


def _check_tokens(found: np.ndarray, recorded: np.ndarray, field: str, what: str, start: int) -> None:
    differing = np.flatnonzero(found != recorded)
    if differing.size:
        k = int(differing[0])
        raise InvalidRequest(f"{field}: {what}[{start + k}] is {found[k]}, on record is {recorded[k]}")


def _check_arrays(datum: Datum, where: str, logprobs_N: np.ndarray) -> None:
    sampled_N = datum.is_sampled
    elsewhere = np.flatnonzero(~sampled_N & (datum.inputs["advantages"] != 0))
    if elsewhere.size:
        raise InvalidRequest(
            f"{where}.loss_fn_inputs['advantages']: position {elsewhere[0]} is not a sampled token, "
            "so its advantage must be 0"
        )
    if (given_N := datum.inputs.get("logprobs")) is None:
        return
    differing = np.flatnonzero(sampled_N & ~(np.abs(given_N - logprobs_N) <= LOGPROB_TOLERANCE))
    if differing.size:
        k = int(differing[0])
        raise InvalidRequest(
            f"{where}.loss_fn_inputs['logprobs']: position {k} is {given_N[k]:.6g}, on record is {logprobs_N[k]:.6g}"
        )
