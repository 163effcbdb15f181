"""How a loaded model is to compute passes: whether sequences are padded or packed, and whether layers are checkpointed.

Kernels differ between machines, so a kind of attention is tried before it is relied upon: a small batch is computed
padded and packed, and what differs, or fails, is not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import structlog
import torch
from torch import Tensor

from app.wire.types import Datum, LoraConfig
from workers.model import attention
from workers.model.base import BaseModel
from workers.model.batch import Row
from workers.model.checkpointing import checkpoint_layers, checkpointed_above
from workers.model.forward import Work
from workers.model.ranks.passes import run_share

logger = structlog.get_logger(__name__)

TRIAL_LENGTHS = (5, 1, 40, 17)
TOLERANCE = {torch.float32: 1e-3}
ROUGH_TOLERANCE = 0.1
"""Relative errors (of norms) that rounding may make of a trial's results, by dtype and for 16-bit numbers. Attention
that saw one sequence too many is off by about 1."""


class CannotPrepare(ValueError):
    """A setting asks for what this machine cannot do; the message names it."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """`attention` and `gradient_checkpointing` as the settings of these names have them; `dense`: see
    `workers.model.attention`."""

    attention: Literal["auto", "padded", "flash", "flex", "dense"] = "auto"
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"


def prepare(base: BaseModel, wanted: Preparation) -> int | None:
    """Let `base` compute passes as it is wanted. Where the model is spread over ranks, each of them comes here.

    Returns how many tokens a micro-batch may have before it is computed in a way that takes longer, None where that
    makes no difference. A model that no packed attention fits is padded, and the log says why. Raises `CannotPrepare`
    if the attention that is asked for by name is not to be had on this machine at all.
    """
    kinds: tuple[attention.Kind, ...]
    if wanted.attention == "auto":
        kinds = ("flash", "flex") if base.device.type == "cuda" else ()
    elif wanted.attention == "padded":
        kinds = ()
    else:
        kinds = (wanted.attention,)
        if why := attention.lacking(wanted.attention, base.device, base.dtype):
            raise CannotPrepare(f"TINWORKS_ATTENTION={wanted.attention}: {why}")
    for kind in kinds:
        if _settle(base, kind):
            break
    above = checkpointed_above(wanted.gradient_checkpointing, base.model)
    if above is not None:
        checkpoint_layers(base.backbone, above=above)
    logger.info("model_prepared", attention=base.attention, checkpointed_above_tokens=above)
    return above or None


def _settle(base: BaseModel, kind: attention.Kind) -> bool:
    """Use `kind` if it goes."""
    why = attention.lacking(kind, base.device, base.dtype) or attention.unfit(kind, base.backbone)
    if why is None:
        expected = _trial(base)
        base.attend(kind)
        try:
            why = _difference(_trial(base), expected, TOLERANCE.get(base.dtype, ROUGH_TOLERANCE))
        except Exception as error:  # a kernel may refuse a shape or a device in any way it likes
            base.recover()
            why = repr(error)
    if why is not None:
        base.attend("padded")
        logger.warning("packed_attention_left_out", kind=kind, reason=why)
    return why is None


def _trial(base: BaseModel) -> Tensor:
    """Log-probabilities and a gradient of a small batch of two adapters, one after the other."""
    draw = np.random.default_rng(0)
    works, rows = [], []
    for seed in range(2):
        adapter = base.new_adapter(LoraConfig(rank=1, seed=seed))
        data = []
        for n in TRIAL_LENGTHS:
            tokens, targets = draw.integers(0, base.lm_head.out_features, (2, n))
            data.append(Datum(tokens.astype(np.int32), {"target_tokens": targets, "weights": np.ones(n, np.float32)}))
        works.append(Work(adapter, data, "cross_entropy"))
        rows += [Row(seed, i, adapter, datum) for i, datum in enumerate(data)]
    computed = run_share(base, works, [rows], count=1, backward=True)
    if computed.errors:
        raise next(iter(computed.errors.values()))
    found = [logprobs.float() for result in computed.results.values() for _, logprobs in result.logprobs]
    return torch.cat([*found, *(work.adapter.grad_flat for work in works)])


def _difference(found: Tensor, expected: Tensor, tolerance: float) -> str | None:
    total = sum(TRIAL_LENGTHS) * 2
    for name, part in (("log-probabilities", slice(0, total)), ("gradients", slice(total, None))):
        error = float((found[part] - expected[part]).norm() / expected[part].norm())
        if not error <= tolerance:
            return f"its {name} differ from those of padded sequences by {error:.2g} of their size"
    return None
