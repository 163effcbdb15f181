"""JSON bodies of training requests: what is refused and in which words, and which bodies are the same request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from app.errors import InvalidRequest
from app.runs.requests import fingerprint, validate
from app.runs.schemas import (
    CreateFromWeights,
    CreateModel,
    LoadWeights,
    OptimStep,
    OtherOptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)

CREATE = {"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
STEP = {"model_id": "s:train:0", "seq_id": 1, "adam_params": {"learning_rate": 1e-3}}
SAVE = {"model_id": "s:train:0", "seq_id": 1, "path": "first"}
EPHEMERAL = {"model_id": "s:train:0", "seq_id": 1, "sampling_session_seq_id": 0}
LOAD = {"model_id": "s:train:0", "seq_id": 1, "path": "tinker://s:train:0/weights/a", "optimizer": True}
LOAD_NEW = {"session_id": "s", "model_seq_id": 0, "path": "tinker://s:train:0/weights/a", "optimizer": True}
DIMUON_STEP = {"model_id": "s:train:0", "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}
GOOD: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (CreateModel, CREATE),
    (OptimStep, STEP),
    (OtherOptimStep, DIMUON_STEP),
    (SaveWeights, SAVE),
    (SaveWeightsForSampler, SAVE),
    (SaveWeightsExternal, SAVE),
    (SaveWeightsForSampler, EPHEMERAL),
    (LoadWeights, LOAD),
    (CreateFromWeights, LOAD_NEW),
]


@pytest.mark.parametrize(("schema", "body"), GOOD)
def test_a_body_with_the_required_fields_is_taken(schema: type[BaseModel], body: dict[str, Any]) -> None:
    assert validate(schema, body)


@pytest.mark.parametrize(("schema", "body"), GOOD)
def test_an_unknown_field_is_refused_by_name(schema: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(schema, body | {"lerning_rate": 1})
    assert caught.value.detail == "lerning_rate: unknown field"


@pytest.mark.parametrize(("schema", "body"), GOOD)
def test_a_missing_field_is_refused_by_name(schema: type[BaseModel], body: dict[str, Any]) -> None:
    optional = {"lora_config", "sampling_session_seq_id"} | ({"path"} if schema is SaveWeightsForSampler else set())
    for name in body.keys() - optional:
        with pytest.raises(InvalidRequest, match=f"^{name}: "):
            validate(schema, {key: value for key, value in body.items() if key != name})


WRONG: dict[str, tuple[type[BaseModel], dict[str, Any], str]] = {
    "rank": (CreateModel, CREATE | {"lora_config": {"rank": 0}}, "lora_config.rank"),
    "nothing trained": (
        CreateModel,
        CREATE | {"lora_config": {"train_mlp": False, "train_attn": False, "train_unembed": False}},
        "lora_config: at least one of",
    ),
    "optimizer": (CreateModel, CREATE | {"optimizer_config": {"type": "sgd"}}, "optimizer_config.type"),
    "optimizer's version": (
        CreateModel,
        CREATE | {"optimizer_config": {"type": "dimuon", "version": 2}},
        "optimizer_config.version",
    ),
    "other step": (OtherOptimStep, DIMUON_STEP | {"optimizer_params": {"type": "sgd"}}, "optimizer_params.type"),
    "momentum": (
        OtherOptimStep,
        DIMUON_STEP | {"optimizer_params": {"type": "dimuon", "learning_rate": 1, "beta1": 1}},
        "optimizer_params.beta1",
    ),
    "unknown in a part": (CreateModel, CREATE | {"lora_config": {"alpha": 1}}, "lora_config.alpha: unknown field"),
    "beta": (OptimStep, STEP | {"adam_params": {"beta1": 1.0}}, "adam_params.beta1"),
    "learning rate": (OptimStep, STEP | {"adam_params": {"learning_rate": -1}}, "adam_params.learning_rate"),
    "infinite": (OptimStep, STEP | {"adam_params": {"eps": float("inf")}}, "adam_params.eps"),
    "slash in a name": (SaveWeights, SAVE | {"path": "a/b"}, "path"),
    "dots for a name": (SaveWeights, SAVE | {"path": ".."}, "path"),
    "line end in a name": (SaveWeights, SAVE | {"path": "a\n"}, "path"),
    "short life": (SaveWeights, SAVE | {"ttl_seconds": 3599}, "ttl_seconds"),
    "long life": (SaveWeights, SAVE | {"ttl_seconds": 11 * 366 * 86400}, "ttl_seconds"),
    "both forms": (SaveWeightsForSampler, SAVE | EPHEMERAL, "exactly one of path and sampling_session_seq_id"),
    "neither form": (SaveWeightsForSampler, {"model_id": "m", "seq_id": 1}, "exactly one of"),
    "named inflight": (SaveWeightsForSampler, SAVE | {"kind": "inflight"}, "kind"),
    "no recipients": (SaveWeightsExternal, SAVE | {"age_encryption_recipients": []}, "age_encryption_recipients"),
    "recipients": (SaveWeightsExternal, SAVE | {"age_encryption_recipients": ["a"] * 11}, "age_encryption_recipients"),
    "short life of an export": (SaveWeightsExternal, SAVE | {"ttl_seconds": 1}, "ttl_seconds"),
    "overwriting an export": (SaveWeightsExternal, SAVE | {"overwrite": True}, "overwrite: unknown field"),
    "token": (LoadWeights, LOAD | {"weights_access_token": 7}, "weights_access_token"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_is_refused_by_its_field(case: str) -> None:
    schema, body, words = WRONG[case]
    with pytest.raises(InvalidRequest) as caught:
        validate(schema, body)
    assert words in caught.value.detail


def test_further_faults_are_counted() -> None:
    with pytest.raises(InvalidRequest, match=r"\(and 2 more\)$"):
        validate(SaveWeights, {})


@pytest.mark.parametrize("body", [None, [], "text", 1])
def test_a_body_that_is_no_object_is_refused(body: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^body: "):
        validate(OptimStep, body)


def test_old_clients_may_leave_adams_defaults_away() -> None:
    params = validate(OptimStep, STEP).adam_params
    assert (params.beta1, params.beta2, params.eps, params.weight_decay, params.grad_clip_norm) == (
        0.9,
        0.95,
        1e-12,
        0.0,
        0.0,
    )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), JSON, max_size=5)


def reversed_everywhere(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reversed_everywhere(value[key]) for key in reversed(value)}
    return [reversed_everywhere(item) for item in value] if isinstance(value, list) else value


@given(OBJECTS)
def test_the_order_of_fields_makes_no_other_request(body: dict[str, Any]) -> None:
    assert fingerprint(body) == fingerprint(reversed_everywhere(body))


@given(OBJECTS)
def test_a_field_of_null_is_a_field_left_away(body: dict[str, Any]) -> None:
    assert fingerprint(body | {"ttl_seconds": None}) == fingerprint(
        {key: value for key, value in body.items() if key != "ttl_seconds"}
    )


@given(OBJECTS, st.text(max_size=5), st.integers(), st.integers())
def test_another_value_makes_another_request(body: dict[str, Any], name: str, one: int, other: int) -> None:
    small = 2**62
    first, second = body | {name: one % small}, body | {name: other % small}
    assert (fingerprint(first) == fingerprint(second)) == (one % small == other % small)


def test_a_field_that_clients_change_at_every_retry_can_be_left_out() -> None:
    without = ("sampling_session_seq_id",)
    retried = EPHEMERAL | {"sampling_session_seq_id": 5}
    assert fingerprint(EPHEMERAL, without=without) == fingerprint(retried, without=without)
    assert fingerprint(EPHEMERAL) != fingerprint(retried)
