"""Every refusal of a batch says which datum and which field, and what it would have taken."""

from __future__ import annotations

import math

import numpy as np
import pytest

from app.custom_losses.graph import LossGraph, LossInput
from app.errors import InvalidRequest
from app.runs.checks import Limits, check_batch, check_custom_batch
from app.runs.loss_specs import LOSS_SPECS
from app.wire.types import Datum, ProvenanceSpan

LIMITS = Limits(vocab_size=10, context_length=4)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def datum(tokens: tuple[int, ...] = (1, 2, 3), **inputs: np.ndarray) -> Datum:
    return Datum(np.array(tokens, np.int32), {"target_tokens": ints(*tokens)} | inputs)


def without_targets(**inputs: np.ndarray) -> Datum:
    return Datum(np.int32([1, 2, 3]), inputs)


def good(loss: str) -> Datum:
    """A datum with everything that a loss requires."""
    spec = LOSS_SPECS[loss]
    made = datum(**{name: floats(0.5, 0.5, 0.5) for name in spec.required if name != "target_tokens"})
    spans = (ProvenanceSpan(True, "s", 0, 3),) if spec.provenance else ()
    return Datum(made.tokens, made.inputs, spans, spans)


@pytest.mark.parametrize("loss", LOSS_SPECS)
def test_a_batch_with_what_the_loss_requires_is_taken(loss: str) -> None:
    check_batch(loss, dict(LOSS_SPECS[loss].config), [good(loss), good(loss)], LIMITS)


def test_several_targets_per_token_are_taken_by_cross_entropy() -> None:
    check_batch("cross_entropy", {}, [datum(target_tokens=np.ones((3, 2), np.int64), weights=np.ones((3, 2)))], LIMITS)


def test_a_datum_that_fills_the_context_with_the_last_token_is_taken() -> None:
    check_batch("cross_entropy", {}, [datum((9, 9, 9, 9))], LIMITS)


X, T, W = "data[1].model_input", "data[1].loss_fn_inputs['target_tokens']", "data[1].loss_fn_inputs['weights']"
WRONG_DATUMS = {
    "no tokens": (datum(()), X, "no tokens"),
    "too many tokens": (datum((1,) * 5), X, "5 tokens exceed the context of 4"),
    "token beyond the vocabulary": (datum((1, 10)), X, "token 10 .* vocabulary of 10"),
    "negative token": (datum((1, -1)), X, "token -1"),
    "no targets": (without_targets(), T, "missing"),
    "unknown input": (datum(mask=floats(1, 1, 1)), "data[1].loss_fn_inputs['mask']", "takes target_tokens, weights"),
    "too few targets": (datum(target_tokens=ints(1, 2)), T, r"shape \[2\], expected \[3\]"),
    "targets in three dimensions": (datum(target_tokens=np.ones((3, 1, 1), np.int64)), T, r"expected \[3\] or"),
    "no targets at a token": (datum(target_tokens=np.ones((3, 0), np.int64)), T, r"shape \[3, 0\]"),
    "float targets": (datum(target_tokens=floats(1, 2, 3)), T, "must be int64"),
    "target beyond the vocabulary": (datum(target_tokens=ints(1, 2, 10)), T, "token 10"),
    "negative target": (datum(target_tokens=ints(1, 2, -100)), T, "token -100"),
    "too few weights": (datum(weights=floats(1, 1)), W, r"shape \[2\], target_tokens has \[3\]"),
    "weights of another shape": (datum(weights=np.ones((3, 2), np.float32)), W, r"shape \[3, 2\]"),
}


@pytest.mark.parametrize("case", WRONG_DATUMS)
def test_a_wrong_datum_is_refused_by_its_index_and_field(case: str) -> None:
    wrong, field, words = WRONG_DATUMS[case]
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_batch("cross_entropy", {}, [datum(), wrong], LIMITS)
    assert caught.value.detail.startswith(field)


@pytest.mark.parametrize("loss", LOSS_SPECS)
def test_each_required_input_is_missed_by_name(loss: str) -> None:
    for missing in LOSS_SPECS[loss].required:
        whole = good(loss)
        inputs = {name: array for name, array in whole.inputs.items() if name != missing}
        with pytest.raises(InvalidRequest, match=rf"data\[0\]\.loss_fn_inputs\['{missing}'\]: missing; {loss} needs"):
            check_batch(loss, {}, [Datum(whole.tokens, inputs)], LIMITS)


@pytest.mark.parametrize("loss", [name for name, spec in LOSS_SPECS.items() if not spec.two_dimensional])
def test_several_targets_per_token_are_refused_where_the_loss_has_one(loss: str) -> None:
    wide = good(loss)
    inputs = {name: np.repeat(array[:, None], 2, axis=1) for name, array in wide.inputs.items()}
    with pytest.raises(InvalidRequest, match=r"data\[0\]\.loss_fn_inputs\['target_tokens'\].*expected \[3\] like"):
        check_batch(loss, {}, [Datum(wide.tokens, inputs)], LIMITS)


def test_an_input_that_only_some_datums_have_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"data\[1\]\.loss_fn_inputs\['weights'\]: must be in every datum"):
        check_batch("cross_entropy", {}, [datum(), datum(weights=floats(1, 1, 1))], LIMITS)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="data: must hold"):
        check_batch("cross_entropy", {}, [], LIMITS)


def test_stable_reinforce_needs_provenance_on_every_datum() -> None:
    whole = good("stable_reinforce")
    with pytest.raises(InvalidRequest, match=r"data\[1\].loss_fn_input_spans: missing"):
        check_batch("stable_reinforce", {}, [whole, Datum(whole.tokens, whole.inputs)], LIMITS)


LOSS = LossGraph("mine", (LossInput("logprobs", 1), LossInput("scale", 0), LossInput("w", 1)), (), (), "x", {})


def custom_datum(**inputs: np.ndarray) -> Datum:
    return datum(**{"scale": floats(0.5), "w": floats(1, 2, 3), "extra": ints(1)} | inputs)


def test_a_custom_loss_takes_what_its_upload_declares_and_leaves_the_rest() -> None:
    check_custom_batch({"loss_id": "l"}, [custom_datum(), custom_datum(w=ints(1, 2, 3))], LIMITS, LOSS)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (datum(w=floats(1, 2, 3)), r"data\[1\].loss_fn_inputs\['scale'\]: missing; loss 'mine' takes it"),
        (custom_datum(scale=floats(1, 2)), r"\['scale'\]: has rank 1, loss 'mine' declares it with rank 0"),
        (custom_datum(w=np.ones((3, 2), np.float32)), r"\['w'\]: has rank 2"),
        (custom_datum(w=floats(1, 2)), r"\['w'\]: has shape \[2\], expected \[3\]"),
        (custom_datum(target_tokens=np.ones((3, 2), np.int64)), "declares logprobs with rank 1"),
        (without_targets(scale=floats(1), w=floats(1, 2, 3)), "target_tokens'\\]: missing"),
        (custom_datum(target_tokens=ints(1, 2, 10)), "token 10"),
    ],
)
def test_a_datum_that_a_custom_loss_cannot_take_names_the_input(wrong: Datum, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_custom_batch({"loss_id": "l"}, [custom_datum(), wrong], LIMITS, LOSS)


def test_a_custom_loss_has_no_other_config() -> None:
    with pytest.raises(InvalidRequest, match=r"loss_fn_config\['graph'\]: unknown to custom"):
        check_custom_batch({"loss_id": "l", "graph": "{}"}, [custom_datum()], LIMITS, LOSS)


@pytest.mark.parametrize("loss", ["no_such_loss", ""])
def test_a_loss_that_is_not_served_is_refused_with_those_that_are(loss: str) -> None:
    with pytest.raises(InvalidRequest, match="cross_entropy, custom, dro") as caught:
        check_batch(loss, {}, [datum()], LIMITS)
    assert caught.value.detail.startswith(f"loss_fn: {loss!r}")


@pytest.mark.parametrize("value", ["text", math.nan, math.inf])
def test_a_config_value_that_is_no_number_is_refused_by_name(value: float | str) -> None:
    with pytest.raises(InvalidRequest, match=r"loss_fn_config\['beta'\]: must be a finite number"):
        check_batch("dro", {"beta": value}, [good("dro")], LIMITS)


def test_a_config_key_of_another_loss_is_refused_with_those_of_this_one() -> None:
    with pytest.raises(InvalidRequest, match=r"loss_fn_config\['beta'\]: unknown to ppo; it takes clip_high_threshold"):
        check_batch("ppo", {"beta": 0.1}, [good("ppo")], LIMITS)
