"""The loss functions of SEMANTICS §3.

Each takes the log-probabilities of the targets and the request's arrays, and returns a plain sum over tokens: no
averaging, no clamping of weights, non-finite values as they are. What each one takes is described in
`app.runs.loss_specs`.

M: tokens of one request in one micro-batch, datum after datum. K: targets per token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from app.runs.loss_specs import LOSS_SPECS


@dataclass(frozen=True, slots=True)
class LossInputs:
    """`arrays`: the request's named inputs, float32 [M] or [M, K] (without `target_tokens`). `config`: complete,
    defaults filled in. `lengths`: tokens of each datum; they add up to M. `sampled`: bool [M], which targets are
    sampled tokens, for losses that take provenance.
    """

    arrays: Mapping[str, Tensor]
    config: Mapping[str, float]
    lengths: Sequence[int]
    sampled: Tensor | None = None

    def threshold(self, name: str) -> Tensor | float:
        """A clipping bound: per token if the datums bring it, else from the configuration."""
        return self.arrays[name] if name in self.arrays else self.config[name]


class Loss(NamedTuple):
    """`value`: the sum, a scalar. `ratio` [M]: exp(lp − q). `clipped` [M]: 1 where clipping took effect. Only the
    losses on sampled tokens have the last two.
    """

    value: Tensor
    ratio: Tensor | None = None
    clipped: Tensor | None = None


LossFunction = Callable[[Tensor, LossInputs], Loss]


def cross_entropy(lp: Tensor, inputs: LossInputs) -> Loss:
    """Σ −lp·w; `lp` [M] or [M, K]."""
    weights = inputs.arrays.get("weights")
    return Loss(-_sum(lp if weights is None else lp * weights))


def importance_sampling(lp: Tensor, inputs: LossInputs) -> Loss:
    """−Σ r·A."""
    ratio = torch.exp(lp - inputs.arrays["logprobs"])
    return Loss(-_sum(ratio * inputs.arrays["advantages"]), ratio, torch.zeros_like(ratio))


def ppo(lp: Tensor, inputs: LossInputs) -> Loss:
    """−Σ min(r·A, clamp(r, lo, hi)·A)."""
    ratio = torch.exp(lp - inputs.arrays["logprobs"])
    return _clipped_surrogate(ratio, ratio, inputs)


def cispo(lp: Tensor, inputs: LossInputs) -> Loss:
    """−Σ sg[clamp(r, lo, hi)]·lp·A."""
    ratio = torch.exp(lp.detach() - inputs.arrays["logprobs"])
    bounded = _clamp(ratio, inputs)
    return Loss(-_sum(bounded * lp * inputs.arrays["advantages"]), ratio, bounded != ratio)


def dro(lp: Tensor, inputs: LossInputs) -> Loss:
    """−Σ (lp·A − ½·beta·(lp − q)²)."""
    log_ratio = lp - inputs.arrays["logprobs"]
    value = lp * inputs.arrays["advantages"] - 0.5 * inputs.config["beta"] * log_ratio.square()
    ratio = torch.exp(log_ratio.detach())
    return Loss(-_sum(value), ratio, torch.zeros_like(ratio))


def gspo(lp: Tensor, inputs: LossInputs) -> Loss:
    """The sequence's ratio s = exp(mean over `sequence_ratio_mask` ≠ 0 of sg[lp] − q) with each token's own gradient,
    s_t = s·exp(lp − sg[lp]); then −Σ min(s_t·A, clamp(s_t, lo, hi)·A). Without a mask the mean is over the sampled
    tokens. A datum with an empty mask has s = 1."""
    fixed = lp.detach()
    given = inputs.arrays.get("sequence_ratio_mask")
    mask = (_sampled(inputs) if given is None else given != 0).to(lp.dtype)
    lengths = torch.tensor(inputs.lengths, device=lp.device)
    datum = torch.repeat_interleave(torch.arange(len(lengths), device=lp.device), lengths, output_size=len(lp))
    log_ratio = torch.where(mask != 0, fixed - inputs.arrays["logprobs"], 0.0)
    zeros = lp.new_zeros(len(lengths))
    mean = zeros.index_add(0, datum, log_ratio) / zeros.index_add(0, datum, mask).clamp_min(1)
    sequence_ratio = torch.exp(mean)[datum] * torch.exp(lp - fixed)
    return _clipped_surrogate(sequence_ratio, torch.exp(fixed - inputs.arrays["logprobs"]), inputs)


def stable_reinforce(lp: Tensor, inputs: LossInputs) -> Loss:
    """−Σ sg[min(r, clip_cap)]·lp·A over the sampled tokens whose r is inside [mask_low, mask_high], plus
    kl_coeff·Σ ½(lp − q)² over all sampled tokens; q is the logprob on record. Our own formula (docs/losses.md)."""
    assert inputs.sampled is not None
    config, sampled, q = inputs.config, inputs.sampled, inputs.arrays["logprobs"]
    ratio = torch.exp(lp.detach() - q)
    outside = (ratio < config["mask_low"]) | (ratio > config["mask_high"])  # false for NaN, which is kept
    weight = ratio.clamp(max=config["clip_cap"])
    policy = torch.where(sampled & ~outside, weight * lp * inputs.arrays["advantages"], 0.0)
    value = -_sum(policy)
    if config["kl_coeff"]:
        value = value + config["kl_coeff"] * _sum(torch.where(sampled, 0.5 * (lp - q).square(), 0.0))
    return Loss(value, ratio, outside | (weight != ratio))


LOSSES: Mapping[str, LossFunction] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
    "stable_reinforce": stable_reinforce,
}


def full_config(name: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """The loss's configuration with defaults filled in. Raises ValueError on an unknown key or a value that is no
    number.
    """
    config = dict(LOSS_SPECS[name].config)
    for key, value in given.items():
        if key not in config:
            raise ValueError(f"loss_fn_config: {name} has no key {key!r}; it takes {sorted(config) or 'none'}")
        if isinstance(value, str):
            raise ValueError(f"loss_fn_config: {key} must be a number, got {value!r}")
        config[key] = float(value)
    return config


class Evaluated(NamedTuple):
    """A loss at one point. `grad`: d value / d lp, like `lp`. `sums`: float64 [6], for `LossMetrics`."""

    grad: Tensor
    sums: Tensor


def evaluate(name: str, lp: Tensor, inputs: LossInputs) -> Evaluated:
    """The value and the gradient of the loss `name` at `lp` [M] or [M, K] (float32, detached)."""
    with torch.enable_grad():
        leaf = lp.detach().requires_grad_()
        loss = LOSSES[name](leaf, inputs)
        (grad,) = torch.autograd.grad(loss.value, leaf)
    return Evaluated(grad, _sums(loss, lp, inputs))


def _sampled(inputs: LossInputs) -> Tensor:
    """Which tokens were sampled, bool [M]: those that provenance says, else those that have a logprob or an advantage,
    since prompt tokens carry zeros in both."""
    if inputs.sampled is not None:
        return inputs.sampled
    return (inputs.arrays["logprobs"] != 0) | (inputs.arrays["advantages"] != 0)


def _sums(loss: Loss, lp: Tensor, inputs: LossInputs) -> Tensor:
    """[value, sampled tokens, Σ ratio, Σ clipped, Σ (q − lp), max ratio]; over sampled tokens."""
    value = loss.value.detach()
    if loss.ratio is None or loss.clipped is None:
        return torch.cat([value.view(1), value.new_zeros(5)])
    q, sampled = inputs.arrays["logprobs"], _sampled(inputs)
    columns = torch.stack([sampled.float(), loss.ratio.detach(), loss.clipped.float(), q - lp])
    columns = torch.where(sampled, columns, 0.0)
    return torch.cat([value.view(1), columns.sum(1, dtype=torch.float64), columns[1].max().double().view(1)])


def combined_metrics(name: str, sums: Tensor) -> dict[str, float]:
    """Metrics of a request from the `sums` [parts, 6] (float64, on the CPU) of its micro-batches."""
    value, count, ratio, clipped, kl = sums[:, :5].sum(0).tolist()
    metrics = {"loss:sum": value}
    if "advantages" in LOSS_SPECS[name].required:
        count = max(count, 1.0)
        metrics["ratio:mean"] = ratio / count
        metrics["ratio:max"] = float(sums[:, 5].max())
        metrics["clipped:mean"] = clipped / count
        metrics["kl_sample_train:mean"] = kl / count
    return metrics


def _clipped_surrogate(objective: Tensor, ratio: Tensor, inputs: LossInputs) -> Loss:
    """−Σ min(x·A, clamp(x, lo, hi)·A) with x = `objective`."""
    advantages = inputs.arrays["advantages"]
    free, bounded = objective * advantages, _clamp(objective, inputs) * advantages
    return Loss(-_sum(torch.minimum(free, bounded)), ratio, bounded.detach() < free.detach())


def _clamp(x: Tensor, inputs: LossInputs) -> Tensor:
    low, high = inputs.threshold("clip_low_threshold"), inputs.threshold("clip_high_threshold")
    if isinstance(low, Tensor) or isinstance(high, Tensor):
        low, high = (torch.as_tensor(bound, dtype=x.dtype, device=x.device) for bound in (low, high))
    return torch.clamp(x, low, high)  # type: ignore[arg-type]


def _sum(x: Tensor) -> Tensor:
    return x.sum(dtype=torch.float64)
