"""What each loss function takes: the API validates requests with it, `workers.model.losses` implements it.

No torch here. Formulas: SEMANTICS §3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class LossSpec:
    """One loss function's inputs.

    `required` and `optional`: names of the per-token arrays of `loss_fn_inputs`, each as long as the datum. `config`:
    the keys of `loss_fn_config` with their defaults. `two_dimensional`: whether arrays may be [N, K], several targets
    per token. `provenance`: whether every datum has to say which recorded sequences it consists of.
    """

    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    config: Mapping[str, float] = field(default_factory=dict)
    two_dimensional: bool = False
    provenance: bool = False


_SAMPLED = ("target_tokens", "logprobs", "advantages")
_CLIP = ("clip_low_threshold", "clip_high_threshold")


def _clip(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


LOSS_SPECS: Mapping[str, LossSpec] = {
    spec.name: spec
    for spec in (
        LossSpec("cross_entropy", ("target_tokens",), ("weights",), two_dimensional=True),
        LossSpec("importance_sampling", _SAMPLED),
        LossSpec("ppo", _SAMPLED, _CLIP, _clip(0.8, 1.2)),
        LossSpec("cispo", _SAMPLED, _CLIP, _clip(0.0, 4.0)),
        LossSpec("dro", _SAMPLED, (), {"beta": 0.05}),
        LossSpec("gspo", _SAMPLED, ("sequence_ratio_mask", *_CLIP), _clip(0.8, 1.2)),
        LossSpec(
            "stable_reinforce",
            ("target_tokens", "advantages"),
            ("logprobs",),
            {"clip_cap": 2.0, "mask_low": 0.125, "mask_high": 8.0, "kl_coeff": 0.0},
            provenance=True,
        ),
    )
}
"""By name. What `custom` takes, its upload says: `app.custom_losses`."""

CUSTOM = "custom"
