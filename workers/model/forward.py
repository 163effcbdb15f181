"""One forward (and backward) pass over the requests of any number of runs.

Requests of all runs share micro-batches, whatever their adapters, ranks and losses. Gradients add up in the adapters.
What one request holds, a NaN or an error, reaches no other: its rows are its own, and a pass in which one request fails
is undone and done again request by request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from app.errors import InvalidRequest
from app.runs.checks import Limits, check_batch
from app.wire.types import Datum, ForwardBackwardOutput
from workers.model.base import BaseModel
from workers.model.batch import MicroBatch, Row, assemble, pack, stack_inputs
from workers.model.logprobs import target_logprobs
from workers.model.lora import Adapter, routed
from workers.model.losses import LossInputs, combined_metrics, evaluate, full_config


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One `forward_backward` (or, with `backward` False, `forward`) request."""

    adapter: Adapter
    data: Sequence[Datum]
    loss_fn: str
    loss_config: Mapping[str, float | str] = field(default_factory=dict)
    backward: bool = True


Outcome = ForwardBackwardOutput | Exception


def run_pass(base: BaseModel, works: Sequence[Work], *, micro_batch_tokens: int) -> list[Outcome]:
    """Log-probabilities, losses and gradients of all `works`, in their order.

    Adds each work's gradient (a plain sum) to its adapter's; a work without `backward` and a work that fails add
    nothing. A failure is returned in the work's place: `InvalidRequest` for bad data, anything else as it was raised.
    `micro_batch_tokens`: how many tokens, padding included, go through the model at once.
    """
    outcomes: list[Outcome | None] = [_refusal(base, work) for work in works]
    for backward in (False, True):
        group = [i for i, work in enumerate(works) if work.backward == backward and outcomes[i] is None]
        for i, outcome in _run_isolated(base, works, group, micro_batch_tokens).items():
            outcomes[i] = outcome
    return [outcome for outcome in outcomes if outcome is not None]


def _refusal(base: BaseModel, work: Work) -> InvalidRequest | None:
    limits = Limits(base.facts.vocab_size, base.facts.context_length)
    try:
        check_batch(work.loss_fn, work.loss_config, work.data, limits)
    except InvalidRequest as error:
        return error
    return None


def _run_isolated(
    base: BaseModel, works: Sequence[Work], group: Sequence[int], micro_batch_tokens: int
) -> dict[int, Outcome]:
    """Runs the works numbered `group` together; if that raises, restores the gradients and runs each by itself."""
    if not group:
        return {}
    adapters = {id(works[i].adapter): works[i].adapter for i in group if works[i].backward}
    before = [(adapter, adapter.grad_flat.clone() if adapter.has_grad else None) for adapter in adapters.values()]
    try:
        return _run(base, works, group, micro_batch_tokens)
    except Exception as error:
        for adapter, grad in before:
            adapter.zero_grad()
            if grad is not None:
                adapter.add_grad(grad)
        if len(group) == 1:
            return {group[0]: error}
    outcomes: dict[int, Outcome] = {}
    for i in group:
        outcomes |= _run_isolated(base, works, [i], micro_batch_tokens)
    return outcomes


@dataclass(slots=True)
class _Result:
    """What a work has so far: (row, logprobs [N] or [N, K] on the device), and a row of loss sums per micro-batch."""

    logprobs: list[tuple[Row, Tensor]] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)


def _run(base: BaseModel, works: Sequence[Work], group: Sequence[int], micro_batch_tokens: int) -> dict[int, Outcome]:
    backward = works[group[0]].backward
    rows = [Row(i, n, works[i].adapter, datum) for i in group for n, datum in enumerate(works[i].data)]
    numbers: dict[int, int] = {}
    owners = [numbers.setdefault(id(row.adapter), len(numbers)) for row in rows]
    results = {i: _Result() for i in group}
    with torch.set_grad_enabled(backward):
        for indices in pack([len(row.datum.tokens) for row in rows], owners, micro_batch_tokens):
            _run_micro_batch(base, works, assemble([rows[i] for i in indices], base.device), results)
    if backward:
        for i in group:
            works[i].adapter.has_grad = True
    return {i: _output(works[i], result) for i, result in results.items()}


def _run_micro_batch(base: BaseModel, works: Sequence[Work], batch: MicroBatch, results: dict[int, _Result]) -> None:
    with routed(batch.row_routing):
        hidden_BLD = base.hidden(batch.input_ids)
    hidden_TD = hidden_BLD.view(-1, hidden_BLD.shape[-1])
    if batch.real is not None:
        hidden_TD = hidden_TD.index_select(0, batch.real)
    logprobs = target_logprobs(hidden_TD, base.lm_head, batch.token_routing, batch.targets)
    fixed = logprobs.detach()
    grads = torch.zeros_like(fixed)
    for part in batch.parts:
        work = works[part.work]
        tokens = slice(part.start, part.stop)
        mine = (tokens,) if fixed.dim() == 1 else (tokens, slice(0, part.k) if part.k is not None else 0)
        inputs = LossInputs(
            stack_inputs(part, base.device),
            full_config(work.loss_fn, work.loss_config),
            [len(row.datum.tokens) for row in part.rows],
        )
        grad, sums = evaluate(work.loss_fn, fixed[mine], inputs)
        grads[mine] = grad
        results[part.work].sums.append(sums)
        pieces = torch.split(fixed[mine], list(inputs.lengths))
        results[part.work].logprobs.extend(zip(part.rows, pieces, strict=True))
    if logprobs.requires_grad and bool((grads != 0).any()):
        torch.autograd.backward(logprobs, grads)


def _output(work: Work, result: _Result) -> ForwardBackwardOutput:
    """One copy to the host per work: all its log-probabilities, and its sums."""
    flat = torch.cat([piece.reshape(-1) for _, piece in result.logprobs]).cpu().numpy()
    outputs: list[Mapping[str, np.ndarray]] = [{}] * len(work.data)
    start = 0
    for row, piece in result.logprobs:
        stop = start + piece.numel()
        outputs[row.index] = {"logprobs": flat[start:stop].reshape(piece.shape)}
        start = stop
    return ForwardBackwardOutput(outputs, combined_metrics(work.loss_fn, torch.stack(result.sums).cpu()))
