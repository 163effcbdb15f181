"""From requests to micro-batches.

`pack` decides, over plain numbers, which sequences share a micro-batch. `assemble` lays one out as tensors: either
sequences are padded on the right to the longest of their micro-batch, or they are packed one after the other in a
single row, which costs no padding and needs attention made for it (`workers.model.attention`). Both ways they lie
adapter by adapter and request by request, so that each adapter has one slice of the rows and each request one slice of
the tokens.

Letters in shapes: B sequences, L padded length, T real tokens of a micro-batch, K targets per token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from app.wire.types import Datum
from workers.model.attention import Packing
from workers.model.lora import Adapter, Routing

MAX_PADDING = 0.1
"""The share of a pass that may be padding before it is worth while to sort its sequences by length."""

SPLIT_PADDING = 0.09
"""The share of a micro-batch that may be padding before another is started. Short micro-batches may have more (see
`SPLIT_COST_TOKENS`), and the whole shall stay under `MAX_PADDING` all the same."""

SPLIT_COST_TOKENS = 64
"""What one more micro-batch costs, in tokens: less padding than this is never worth a split."""


def pack(lengths: Sequence[int], owners: Sequence[int], budget_tokens: int, *, padded: bool = True) -> list[list[int]]:
    """Split sequences into micro-batches of at most `budget_tokens` tokens, padding included if there is any.

    `lengths[i]` and `owners[i]`: tokens and adapter number of sequence i. Returns the sequences' indices, each once;
    within a micro-batch by (owner, index). A sequence longer than the budget goes alone. Sequences of one owner stay
    together unless that costs too much padding; then they are sorted by length alone. In no micro-batch more than
    `SPLIT_PADDING` is padding, or `SPLIT_COST_TOKENS` tokens if that is more.
    """
    if not padded:
        return _fill(sorted(range(len(lengths)), key=lambda i: (owners[i], i)), lengths, budget_tokens)
    by_owner = sorted(range(len(lengths)), key=lambda i: (owners[i], -lengths[i], i))
    batches = _cut(by_owner, lengths, budget_tokens)
    if padding(batches, lengths) > MAX_PADDING:
        by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], owners[i], i))
        batches = min(batches, _cut(by_length, lengths, budget_tokens), key=lambda b: padding(b, lengths))
    return [sorted(batch, key=lambda i: (owners[i], i)) for batch in batches]


def _fill(order: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    total = 0
    for i in order:
        if batches and total + lengths[i] <= budget_tokens:
            batches[-1].append(i)
            total += lengths[i]
        else:
            batches.append([i])
            total = lengths[i]
    return batches


def padding(batches: Sequence[Sequence[int]], lengths: Sequence[int]) -> float:
    """The share of all rows that is padding, 0 … 1."""
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    return 1 - sum(lengths) / padded if padded else 0.0


def _cut(order: Sequence[int], lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    longest = real = 0
    for i in order:
        longest, real = max(longest, lengths[i]), real + lengths[i]
        if batches:
            padded = (len(batches[-1]) + 1) * longest
            if padded <= budget_tokens and padded - real <= max(SPLIT_PADDING * padded, SPLIT_COST_TOKENS):
                batches[-1].append(i)
                continue
        batches.append([i])
        longest = real = lengths[i]
    return batches


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sequence of a pass: datum `index` of request number `work`."""

    work: int
    index: int
    adapter: Adapter
    datum: Datum

    @property
    def targets(self) -> np.ndarray:
        """[N] or [N, K]."""
        return self.datum.inputs["target_tokens"]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one request has in a micro-batch: rows and tokens `start` … `stop`-1, all with K targets per token (None:
    [N]).
    """

    work: int
    rows: tuple[Row, ...]
    start: int
    stop: int
    k: int | None


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """`input_ids` [B, L], or [1, T] if sequences are packed, as `packing` says then. `real` [T]: the rows of B·L that
    hold a token; None if all do. `targets` [T], or [T, K] with the largest K here. `row_routing` is over the B·L rows,
    `token_routing` over the T tokens.
    """

    input_ids: Tensor
    real: Tensor | None
    targets: Tensor
    row_routing: Routing
    token_routing: Routing
    parts: tuple[Part, ...]
    packing: Packing | None = None


def assemble(rows: Sequence[Row], device: torch.device, *, padded: bool = True) -> MicroBatch:
    """Lay out `rows`, ordered by adapter and request, as one micro-batch on `device`."""
    lengths = [len(row.datum.tokens) for row in rows]
    token_routing = Routing.of([(row.adapter, length) for row, length in zip(rows, lengths, strict=True)])
    targets = torch.from_numpy(_targets(rows, sum(lengths))).to(device)
    parts = _parts(rows, lengths)
    if not padded:
        tokens = np.concatenate([row.datum.tokens for row in rows]).astype(np.int64, copy=False)
        input_ids_1T = torch.from_numpy(tokens).unsqueeze(0).to(device)
        packing = Packing.of(lengths, device)
        return MicroBatch(input_ids_1T, None, targets, token_routing, token_routing, parts, packing)
    longest = max(lengths)
    input_ids = np.zeros((len(rows), longest), dtype=np.int64)
    for i, row in enumerate(rows):
        input_ids[i, : lengths[i]] = row.datum.tokens
    real = None
    if min(lengths) < longest:
        real = np.flatnonzero(np.arange(longest) < np.asarray(lengths)[:, None])
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).to(device),
        real=None if real is None else torch.from_numpy(real).to(device),
        targets=targets,
        row_routing=Routing.of([(row.adapter, longest) for row in rows]),
        token_routing=token_routing,
        parts=parts,
    )


def _targets(rows: Sequence[Row], total: int) -> np.ndarray:
    if all(row.targets.ndim == 1 for row in rows):
        return np.concatenate([row.targets for row in rows]).astype(np.int64, copy=False)
    width = max(row.targets.shape[1] if row.targets.ndim == 2 else 1 for row in rows)
    targets = np.zeros((total, width), dtype=np.int64)
    start = 0
    for row in rows:
        columns = row.targets if row.targets.ndim == 2 else row.targets[:, None]
        targets[start : start + len(columns), : columns.shape[1]] = columns
        start += len(columns)
    return targets


def _parts(rows: Sequence[Row], lengths: Sequence[int]) -> tuple[Part, ...]:
    parts: list[Part] = []
    start = 0
    for row, length in zip(rows, lengths, strict=True):
        stop = start + length
        k = row.targets.shape[1] if row.targets.ndim == 2 else None
        if parts and (parts[-1].work, parts[-1].k) == (row.work, k):
            last = parts.pop()
            parts.append(Part(row.work, (*last.rows, row), last.start, stop, k))
        else:
            parts.append(Part(row.work, (row,), start, stop, k))
        start = stop
    return tuple(parts)


def stack_inputs(part: Part, device: torch.device) -> Mapping[str, Tensor]:
    """A part's loss inputs but `target_tokens`, float32 [M] or [M, K], datum after datum. An optional input that some
    of its datums lack must be missing from all of them.
    """
    names = [name for name in part.rows[0].datum.inputs if name != "target_tokens"]
    arrays = {name: np.concatenate([row.datum.inputs[name] for row in part.rows]) for name in names}
    return {name: torch.from_numpy(a.astype(np.float32, copy=False)).to(device) for name, a in arrays.items()}
