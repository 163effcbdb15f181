"""What each input and each setting of the loss functions does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.runs.loss_specs import LOSS_SPECS
from tests.e2e.field_checks import Check, Probe, differs, refused
from tests.e2e.field_probes_training import N, cross_entropy, floats, ints, loss_pass, stable_reinforce
from tests.e2e.field_world import ABSENT, PROMPT, ROWS

INPUTS = "data.0.loss_fn_inputs."
OTHER_TARGETS = ints(*[token + 1 for token in ROWS[0][1:]])
OTHER_INPUTS = {
    "target_tokens": OTHER_TARGETS,
    "weights": floats(*[0.5] * N),
    "logprobs": floats(*[-7.9] * N),
    "advantages": floats(*[0.3] * N),
    "sequence_ratio_mask": floats(1.0, 0.0, 1.0, 1.0),
    "clip_low_threshold": floats(*[0.99] * N),
    "clip_high_threshold": floats(*[1.01] * N),
}
OTHER_CONFIG = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01, "beta": 1.0}
STABLE_CONFIG = {"clip_cap": 0.5, "mask_low": 1.5, "mask_high": 0.5, "kl_coeff": 1000.0}
LATER = {
    f"data.0.{kind}_spans.{i}.{arm}.sequence_id": "$later_record_id"
    for kind in ("model_input", "loss_fn_input")
    for i, arm in enumerate(("prompt_tokens", "sampled_tokens"))
}


def _of(loss: str, probe: Probe) -> list[Check]:
    spec = LOSS_SPECS[loss]
    inputs = [
        differs(f"{loss} input.{name}", probe, {**_where(name), INPUTS + name: OTHER_INPUTS[name]}, _where(name))
        for name in (*spec.required, *spec.optional)
    ]
    needed = [refused(f"{loss} input.{name}", probe, {INPUTS + name: ABSENT}) for name in spec.required]
    return [*inputs, *needed, *_settings(loss, probe, OTHER_CONFIG)]


def _settings(loss: str, probe: Probe, values: Mapping[str, float], **also: str) -> list[Check]:
    config = LOSS_SPECS[loss].config
    effects = [
        differs(
            f"{loss} config.{key}",
            probe,
            {**_where(key), **also, "loss_fn_config": {key: values[key]}},
            {**_where(key), **also},
        )
        for key in config
    ]
    odd = [refused(f"{loss} config.{key}", probe, {"loss_fn_config": {key: "NaN"}}) for key in config]
    return [*effects, *odd]


def _where(name: str) -> dict[str, Any]:
    """A lower threshold shows where ratios lie below 1."""
    return {INPUTS + "logprobs": floats(*[-7.0] * N)} if name == "clip_low_threshold" else {}


STABLE = "stable_reinforce"
SAMPLED = len(PROMPT)
ZEROS = [0.0] * (SAMPLED - 1)

LOSSES: tuple[Check, ...] = (
    *_of("cross_entropy", cross_entropy),
    *(check for loss in ("importance_sampling", "ppo", "cispo", "dro", "gspo") for check in _of(loss, loss_pass(loss))),
    refused(f"{STABLE} input.target_tokens", stable_reinforce, {INPUTS + "target_tokens": ints(*[7] * 5)}),
    differs(f"{STABLE} input.advantages", stable_reinforce, {INPUTS + "advantages": floats(*ZEROS, 0.5, 1.0, 1.0)}, {}),
    refused(f"{STABLE} input.logprobs", stable_reinforce, {INPUTS + "logprobs": floats(*[-1.0] * 5)}),
    *_settings(STABLE, stable_reinforce, STABLE_CONFIG, **LATER),
)
