"""What micro-batches, zero weights and many tenants do for a training pass: one ratio of speeds a line.

    python bench/train_ratios.py [--threads 1] [--pairs 30] [--only NAME …] [--model FOLDER]

The Qwen3 of a million parameters, or the model in a folder; cross-entropy, adapters on all linear layers and the
unembedding. Each ratio is how many times as fast ours is, with its 95 % interval and the bar that it is held against.

zero-weights    8 sequences of 64 tokens, three quarters of them without weight; against PEFT's loop
ragged          32 sequences of 16 … 256 tokens; against PEFT's loop over 8 padded sequences at a time
tenants         8 tenants of rank 8 with 8 sequences of 64 each; against one tenant with 64
mixed-ranks     the same, two tenants each of ranks 4, 8, 16 and 64; against one of rank 23, which is their mean
residents       a step of one run with 64 resident; against the same with itself alone
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from loops import check_same_loss, datums, model_of, our_base, our_step, peft_step, with_peft
from pairs import Ratio, timed
from transformers import PreTrainedModel

from app.wire.types import AdamParams, Datum, LoraConfig
from workers.model.engine import SoloEngine
from workers.model.forward import Work
from workers.model.optim import fresh_state

RANK = 8
MIXED_RANKS = (4, 8, 16, 64)

Case = Callable[[PreTrainedModel, int], Ratio]


def zero_weights(model: PreTrainedModel, pairs: int) -> Ratio:
    """See above."""
    data = datums([64] * 8, model.config.vocab_size, unweighted=0.75)
    return _against_peft(model, data, pairs, batch=None)


def ragged(model: PreTrainedModel, pairs: int) -> Ratio:
    """See above."""
    lengths = np.random.default_rng(1).integers(16, 257, 32).tolist()
    return _against_peft(model, datums(lengths, model.config.vocab_size), pairs, batch=8)


def _against_peft(model: PreTrainedModel, data: list[Datum], pairs: int, batch: int | None) -> Ratio:
    base, at_once = our_base(copy.deepcopy(model))
    ours = our_step(base, [(base.new_adapter(LoraConfig(rank=RANK, seed=0)), data)], micro_batch_tokens=at_once)
    theirs = peft_step(with_peft(copy.deepcopy(model), RANK), data, batch=batch)
    check_same_loss(ours, theirs)
    return timed(ours, theirs, pairs)


def tenants(model: PreTrainedModel, pairs: int) -> Ratio:
    """See above."""
    return _against_one_tenant(model, [RANK] * 8, pairs)


def mixed_ranks(model: PreTrainedModel, pairs: int) -> Ratio:
    """See above."""
    return _against_one_tenant(model, sorted(MIXED_RANKS * 2), pairs)


def _against_one_tenant(model: PreTrainedModel, ranks: list[int], pairs: int) -> Ratio:
    base, at_once = our_base(copy.deepcopy(model))
    data = datums([64] * 64, model.config.vocab_size)
    adapters = [base.new_adapter(LoraConfig(rank=rank, seed=i)) for i, rank in enumerate(ranks)]
    share = len(data) // len(adapters)
    shares = [(adapter, data[i * share :][:share]) for i, adapter in enumerate(adapters)]
    many = our_step(base, shares, micro_batch_tokens=at_once)
    mean = base.new_adapter(LoraConfig(rank=sum(ranks) // len(ranks), seed=0))
    one = our_step(base, [(mean, data)], micro_batch_tokens=at_once)
    check_same_loss(many, one)
    return timed(many, one, pairs)


def residents(model: PreTrainedModel, pairs: int) -> Ratio:
    """See above."""
    data = datums([64] * 8, model.config.vocab_size)
    return timed(_step_among(copy.deepcopy(model), data, 64), _step_among(copy.deepcopy(model), data, 1), pairs)


def _step_among(model: PreTrainedModel, data: list[Datum], resident: int) -> Callable[[], None]:
    """A forward_backward and an optim_step of one of so many runs that have all been trained."""
    base, at_once = our_base(model)
    engine = SoloEngine(base, micro_batch_tokens=at_once)
    adapters = [engine.base.new_adapter(LoraConfig(rank=RANK, seed=i)) for i in range(resident)]
    params = AdamParams(learning_rate=1e-4)
    states = [fresh_state("adamw", adapter) for adapter in adapters]

    def step(number: int) -> None:
        (output,) = engine.run_pass([Work(adapters[number], data, "cross_entropy")])
        assert not isinstance(output, Exception), output
        engine.optimizer_step([(adapters[number], states[number], params)])

    for number in range(resident):
        step(number)
    return lambda: step(resident // 2)


CASES: dict[str, tuple[Case, float]] = {
    "zero-weights": (zero_weights, 1.2),
    "ragged": (ragged, 1.5),
    "tenants": (tenants, 0.95),
    "mixed-ranks": (mixed_ranks, 0.9),
    "residents": (residents, 0.95),
}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--only", nargs="*", choices=list(CASES), default=list(CASES))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = model_of(arguments.model)
    print(f"threads={arguments.threads} pairs={arguments.pairs}")
    for name in arguments.only:
        case, bar = CASES[name]
        found = case(model, arguments.pairs)
        print(f"{name:13} {found}  bar {bar}  ours {found.ours:.2f} ms, against {found.theirs:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
