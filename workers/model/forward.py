"""One forward (and backward) pass over the requests of any number of runs.

Requests of all runs share micro-batches, whatever their adapters, ranks and losses. Gradients add up in the adapters.
What one request holds, a NaN or an error, reaches no other: its rows are its own, and a pass in which one request fails
is undone and done again request by request. One that does not fit into memory by itself is tried in smaller and smaller
micro-batches, down to one datum at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from app.errors import InvalidRequest
from app.runs.checks import Limits, check_batch, check_custom_batch
from app.runs.loss_specs import LOSS_SPECS
from app.wire.types import Datum, ForwardBackwardOutput
from workers.metrics import count_micro_batches
from workers.model.base import BaseModel
from workers.model.batch import MicroBatch, Part, Row, assemble, pack, stack_inputs
from workers.model.custom_loss import CustomLoss
from workers.model.logprobs import target_logprobs
from workers.model.lora import Adapter, routed
from workers.model.losses import Evaluated, LossInputs, combined_metrics, evaluate, full_config
from workers.model.memory import does_not_fit, is_out_of_memory, refuse_what_cannot_fit, release


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """One `forward_backward` (or, with `backward` False, `forward`) request. `custom`: the loss itself, where `loss_fn`
    is `custom`."""

    adapter: Adapter
    data: Sequence[Datum]
    loss_fn: str
    loss_config: Mapping[str, float | str] = field(default_factory=dict)
    backward: bool = True
    custom: CustomLoss | None = None


Outcome = ForwardBackwardOutput | Exception


def run_pass(base: BaseModel, works: Sequence[Work], *, micro_batch_tokens: int) -> list[Outcome]:
    """Log-probabilities, losses and gradients of all `works`, in their order.

    Adds each work's gradient (a plain sum) to its adapter's; a work without `backward` and a work that fails add
    nothing. A failure is returned in the work's place: `InvalidRequest` for bad data, anything else as it was raised.
    `micro_batch_tokens`: how many tokens, padding included, go through the model at once.
    """
    outcomes: list[Outcome | None] = [refusal(base, work) for work in works]
    for backward in (False, True):
        group = [i for i, work in enumerate(works) if work.backward == backward and outcomes[i] is None]
        for i, outcome in _run_isolated(base, works, group, micro_batch_tokens).items():
            outcomes[i] = outcome
    return [outcome for outcome in outcomes if outcome is not None]


def refusal(base: BaseModel, work: Work) -> InvalidRequest | None:
    """Why a work cannot be computed, as far as that shows before it is."""
    limits = Limits(base.facts.vocab_size, base.facts.context_length)
    try:
        if work.custom is None:
            check_batch(work.loss_fn, work.loss_config, work.data, limits)
        else:
            check_custom_batch(work.loss_config, work.data, limits, work.custom.graph)
            work.custom.check(work.data)
    except InvalidRequest as error:
        return error
    return None


def _run_isolated(
    base: BaseModel, works: Sequence[Work], group: Sequence[int], micro_batch_tokens: int
) -> dict[int, Outcome]:
    """Runs the works numbered `group` together; if that raises, restores the gradients and runs each by itself."""
    if not group:
        return {}
    before = SavedGradients(works[i].adapter for i in group if works[i].backward)
    outcomes: dict[int, Outcome] = {}
    try:
        return _run(base, works, group, micro_batch_tokens)
    except Exception as error:
        before.restore()
        if short := is_out_of_memory(error):
            longest = max(len(datum.tokens) for i in group for datum in works[i].data)
            if len(group) == 1 and micro_batch_tokens <= longest:
                return {group[0]: does_not_fit(longest, error)}
        elif len(group) == 1:
            return {group[0]: error}
    if short:  # only now does nothing hold what the failed pass has allocated
        release()
    if len(group) == 1:
        return _run_isolated(base, works, group, max(longest, micro_batch_tokens // 2))
    for i in group:
        outcomes |= _run_isolated(base, works, [i], micro_batch_tokens)
    return outcomes


class SavedGradients:
    """The gradients of some adapters as they are now, to undo a pass."""

    def __init__(self, adapters: Iterable[Adapter]) -> None:
        each = {id(adapter): adapter for adapter in adapters}.values()
        self._saved = [(adapter, adapter.grad_flat.clone() if adapter.has_grad else None) for adapter in each]

    def restore(self) -> None:
        """Let the gradients be what they were."""
        for adapter, grad in self._saved:
            adapter.zero_grad()
            if grad is not None:
                adapter.add_grad(grad)


@dataclass(slots=True)
class Result:
    """What a work has so far: (row, logprobs [N] or [N, K] on the device), and a row of loss sums per micro-batch."""

    logprobs: list[tuple[Row, Tensor]] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)


def _run(base: BaseModel, works: Sequence[Work], group: Sequence[int], micro_batch_tokens: int) -> dict[int, Outcome]:
    backward = works[group[0]].backward
    rows = [Row(i, n, works[i].adapter, datum) for i in group for n, datum in enumerate(works[i].data)]
    numbers: dict[int, int] = {}
    owners = [numbers.setdefault(id(row.adapter), len(numbers)) for row in rows]
    results = {i: Result() for i in group}
    with torch.set_grad_enabled(backward):
        lengths = [len(row.datum.tokens) for row in rows]
        batches = pack(lengths, owners, micro_batch_tokens, padded=base.pads)
        count_micro_batches(batches, lengths, padded=base.pads)
        for indices in batches:
            refuse_what_cannot_fit(base, _size([lengths[i] for i in indices], base), backward=backward)
            batch = assemble([rows[i] for i in indices], base.device, padded=base.pads)
            _run_micro_batch(base, works, batch, results)
    if backward:
        for i in group:
            works[i].adapter.has_grad = True
    return {i: output(works[i], result) for i, result in results.items()}


def _size(lengths: Sequence[int], base: BaseModel) -> int:
    """Tokens of a micro-batch, padding included if there is any."""
    return len(lengths) * max(lengths) if base.pads else sum(lengths)


def _run_micro_batch(base: BaseModel, works: Sequence[Work], batch: MicroBatch, results: dict[int, Result]) -> None:
    logprobs = batch_logprobs(base, batch)
    fixed = logprobs.detach()
    grads = torch.zeros_like(fixed)
    for part in batch.parts:
        evaluate_part(works[part.work], part, fixed, grads, results[part.work])
    if logprobs.requires_grad and bool((grads != 0).any()):
        torch.autograd.backward(logprobs, grads)


def batch_logprobs(base: BaseModel, batch: MicroBatch) -> Tensor:
    """Of all targets of a micro-batch, [T] or [T, K] like them."""
    with routed(batch.row_routing):
        hidden_BLD = base.hidden(batch.input_ids, batch.packing)
    hidden_TD = hidden_BLD.view(-1, hidden_BLD.shape[-1])
    if batch.real is not None:
        hidden_TD = hidden_TD.index_select(0, batch.real)
    return target_logprobs(hidden_TD, base.lm_head, batch.token_routing, batch.targets)


def evaluate_part(work: Work, part: Part, logprobs: Tensor, grads: Tensor, result: Result) -> None:
    """The loss of one part of a micro-batch, whose (detached) `logprobs` are given: writes its gradient into `grads`,
    which is like them, and adds to `result`.
    """
    tokens = slice(part.start, part.stop)
    mine = (tokens,) if logprobs.dim() == 1 else (tokens, slice(0, part.k) if part.k is not None else 0)
    lengths = [len(row.datum.tokens) for row in part.rows]
    if work.custom is None:
        grad, sums = _evaluate(work, part, logprobs[mine], lengths)
    else:
        grad, sums = _evaluate_custom(work.custom, part, logprobs[mine], lengths)
    grads[mine] = grad
    result.sums.append(sums)
    result.logprobs.extend(zip(part.rows, torch.split(logprobs[mine], lengths), strict=True))


def _evaluate(work: Work, part: Part, logprobs: Tensor, lengths: Sequence[int]) -> Evaluated:
    device = logprobs.device
    sampled = None
    if LOSS_SPECS[work.loss_fn].provenance:
        sampled = torch.from_numpy(np.concatenate([row.datum.is_sampled for row in part.rows])).to(device)
    config = full_config(work.loss_fn, work.loss_config)
    return evaluate(work.loss_fn, logprobs, LossInputs(stack_inputs(part, device), config, lengths, sampled))


def _evaluate_custom(custom: CustomLoss, part: Part, logprobs: Tensor, lengths: Sequence[int]) -> Evaluated:
    """Datum by datum on the CPU. Raises InvalidRequest for the first datum whose values the loss cannot take."""
    pieces = torch.split(logprobs.cpu(), list(lengths))
    losses = [
        custom.evaluate(piece, row.datum, f"data[{row.index}]") for piece, row in zip(pieces, part.rows, strict=True)
    ]
    grad = torch.cat([loss.grad for loss in losses])
    sums = torch.stack([loss.sums for loss in losses]).sum(0)
    return Evaluated(grad.to(logprobs.device), sums)


def output(work: Work, result: Result) -> ForwardBackwardOutput:
    """One copy to the host per work: all its log-probabilities, and its sums."""
    flat = torch.cat([piece.reshape(-1) for _, piece in result.logprobs]).cpu().numpy()
    outputs: list[Mapping[str, np.ndarray]] = [{}] * len(work.data)
    start = 0
    for row, piece in result.logprobs:
        stop = start + piece.numel()
        outputs[row.index] = {"logprobs": flat[start:stop].reshape(piece.shape)}
        start = stop
    sums = torch.stack(result.sums).cpu()
    if work.custom is None:
        return ForwardBackwardOutput(outputs, combined_metrics(work.loss_fn, sums))
    return ForwardBackwardOutput(outputs, work.custom.metrics(sums, len(work.data)))
