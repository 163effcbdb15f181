"""One rank's share of a pass, and how the pass and its results travel.

All ranks run equally many micro-batches, since the base model's weights are gathered in each; a rank that has fewer
runs empty ones. A loss that fails is noted and its part left out, so that the rank stays in step with the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from app.errors import InvalidRequest
from app.wire.types import Datum, ProvenanceSpan
from workers.model.adapter import Adapter
from workers.model.base import BaseModel
from workers.model.batch import MicroBatch, Row, assemble
from workers.model.custom_loss import compile_loss
from workers.model.forward import Result, Work, batch_logprobs, evaluate_part
from workers.model.lora import Routing
from workers.model.ranks.messages import Message
from workers.model.ranks.shares import Shares

PASS, RESULTS = "pass", "results"


@dataclass(slots=True)
class Computed:
    """What one rank found: a result of each work that it has rows of, and the errors of works that failed."""

    results: dict[int, Result] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)


def run_share(
    base: BaseModel, works: Sequence[Work], batches: Sequence[Sequence[Row]], *, count: int, backward: bool
) -> Computed:
    """Run `batches` and then empty ones until there are `count`; gradients add up in this rank's adapters."""
    computed = Computed()
    with torch.set_grad_enabled(backward):
        for i in range(count):
            batch = _empty_batch(base.device)
            if i < len(batches):
                batch = assemble(batches[i], base.device, padded=base.pads)
            logprobs = base.whole(partial(batch_logprobs, base, batch))
            fixed = logprobs.detach()
            grads = torch.zeros_like(fixed)
            for part in batch.parts:
                try:
                    result = computed.results.setdefault(part.work, Result())
                    evaluate_part(works[part.work], part, fixed, grads, result)
                except Exception as error:  # told to rank 0, which fails the work
                    computed.errors.setdefault(part.work, error)
            if backward:
                torch.autograd.backward(logprobs, grads)
    base.release()
    return computed


def _empty_batch(device: torch.device) -> MicroBatch:
    """One token of nobody."""
    nothing = torch.zeros((1, 1), dtype=torch.int64, device=device)
    nobody = Routing(1, ())
    return MicroBatch(
        input_ids=nothing, real=None, targets=nothing[0], row_routing=nobody, token_routing=nobody, parts=()
    )


# -- how it travels


def pass_message(
    works: Sequence[Work], numbers: Mapping[Adapter, int], rows: Sequence[Row], shares: Shares, *, backward: bool
) -> Message:
    """A pass, for all ranks. `numbers`: by which the ranks know the adapters."""
    arrays: list[np.ndarray] = []
    described = []
    for row in rows:
        datum = row.datum
        arrays += [datum.tokens, *datum.inputs.values()]
        spans = [[span.sampled, span.length] for span in datum.loss_fn_input_spans]
        described.append([row.work, row.index, list(datum.inputs), spans])
    fields = {
        "backward": backward,
        "works": [
            {
                "adapter": numbers[work.adapter],
                "loss_fn": work.loss_fn,
                "loss_config": dict(work.loss_config),
                "custom": work.custom.text if work.custom else None,
            }
            for work in works
        ],
        "rows": described,
        "shares": shares,
    }
    return Message(PASS, fields, arrays)


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """A pass as a rank hears of it. `batches`: its own rows; `numbers`: which rows of the whole pass they are."""

    backward: bool
    works: list[Work]
    batches: list[list[Row]]
    numbers: dict[Row, int]
    count: int

    @property
    def adapters(self) -> list[Adapter]:
        """All adapters of the pass."""
        return list({id(work.adapter): work.adapter for work in self.works}.values())


def read_pass(message: Message, adapters: Mapping[int, Adapter], rank: int) -> Pass:
    """The pass that `pass_message` describes, as far as it concerns `rank`."""
    fields = message.fields
    works = [
        Work(
            adapter=adapters[each["adapter"]],
            data=(),
            loss_fn=each["loss_fn"],
            loss_config=each["loss_config"],
            backward=fields["backward"],
            custom=None if each["custom"] is None else compile_loss(each["custom"]),
        )
        for each in fields["works"]
    ]
    arrays = iter(message.arrays)
    rows = []
    for work, index, names, spans in fields["rows"]:
        tokens = next(arrays)
        inputs = {name: next(arrays) for name in names}
        claims = [ProvenanceSpan(sampled, "", 0, length) for sampled, length in spans]
        rows.append(Row(work, index, works[work].adapter, Datum(tokens, inputs, (), claims)))
    mine = fields["shares"][rank]
    return Pass(
        backward=fields["backward"],
        works=works,
        batches=[[rows[i] for i in batch] for batch in mine],
        numbers={rows[i]: i for batch in mine for i in batch},
        count=batch_count(fields["shares"]),
    )


def batch_count(shares: Shares) -> int:
    """How many micro-batches every rank runs."""
    return max(map(len, shares))


def results_message(computed: Computed, numbers: Mapping[Row, int]) -> Message:
    """One rank's results, for rank 0. `numbers`: of its rows in the whole pass."""
    described, arrays = [], []
    for work, result in computed.results.items():
        if work not in computed.errors:
            described.append([work, [numbers[row] for row, _ in result.logprobs]])
            flat = torch.cat([logprobs.reshape(-1) for _, logprobs in result.logprobs])
            arrays += [torch.stack(result.sums).cpu().numpy(), flat.cpu().numpy()]
    errors = {
        work: [error.detail, True] if isinstance(error, InvalidRequest) else [repr(error), False]
        for work, error in computed.errors.items()
    }
    return Message(RESULTS, {"results": described, "errors": errors}, arrays)


def add_results(message: Message, rows: Sequence[Row], computed: Computed, device: torch.device) -> None:
    """Add another rank's results to those of this one, which are on `device`."""
    arrays = iter(torch.from_numpy(array).to(device) for array in message.arrays)
    for work, numbers in message.fields["results"]:
        result = computed.results.setdefault(work, Result())
        result.sums.extend(next(arrays).unbind())
        mine = [rows[number] for number in numbers]
        pieces = next(arrays).split([row.targets.size for row in mine])
        result.logprobs.extend((row, piece.view(row.targets.shape)) for row, piece in zip(mine, pieces, strict=True))
    for work, (text, invalid) in message.fields["errors"].items():
        computed.errors.setdefault(int(work), InvalidRequest(text) if invalid else RuntimeError(text))
