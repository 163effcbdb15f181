"""The optimizer of a run over HTTP: chosen at its creation, told by `get_info` and `weights_info`, then fixed."""

from __future__ import annotations

import orjson
import pytest

from app.runs.models import Run
from tests.factories import add_checkpoint
from tests.integration.conftest import Api

DIMUON = {"type": "dimuon", "version": 1}
STEP = {"type": "dimuon", "learning_rate": 0.1}


def dimuon_run(api: Api, **config: object) -> str:
    """A run that is stepped with dimuon."""
    model_id: str = api.create(api.session(), optimizer_config={"type": "dimuon", **config})["model_id"]
    return model_id


def error_of(api: Api, model_id: str, **fields: object) -> str:
    """What becomes of a step that fails on arrival."""
    api.ok("optim_step", {"model_id": model_id, "seq_id": 1, "type": "optim_step", **fields})
    answer = api.poll(f"{model_id}:1").json()
    assert answer["category"] == "user"
    return str(answer["error"])


@pytest.mark.parametrize("config", [{}, {"version": 1}])
def test_a_run_and_its_checkpoints_tell_their_optimizer(each_api: Api, config: dict[str, object]) -> None:
    model_id = dimuon_run(each_api, **config)
    assert each_api.operation(model_id, 0).state == "accepted"
    assert each_api.ok("get_info", {"model_id": model_id})["optimizer_config"] == DIMUON
    with each_api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, model_id))
    info = each_api.ok("weights_info", {"tinker_path": f"tinker://{model_id}/weights/first"})
    assert info["optimizer_config"] == DIMUON


def test_its_steps_are_taken_with_its_own_hyperparameters(api: Api) -> None:
    model_id = dimuon_run(api)
    api.ok("optim_step", {"model_id": model_id, "seq_id": 1, "optimizer_params": STEP, "adam_params": None})
    row = api.operation(model_id, 1)
    assert row.state == "accepted" and row.body is not None
    assert orjson.loads(row.body) == STEP | {"grad_clip_norm": 0.0, "beta1": 0.9}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"adam_params": {}}, "adam_params: this run's optimizer is dimuon; send optimizer_params"),
        ({"adam_params": {}, "optimizer_params": STEP}, "adam_params: this run's optimizer is dimuon"),
        ({}, "optimizer_params: Field required"),
        ({"optimizer_params": {"learning_rate": 1}}, "optimizer_params.type: Field required"),
        ({"optimizer_params": STEP | {"type": "lion"}}, "optimizer_params.type: Input should be 'dimuon'"),
        ({"optimizer_params": {"type": "dimuon"}}, "optimizer_params.learning_rate: Field required"),
        ({"optimizer_params": STEP | {"learning_rate": -1}}, "optimizer_params.learning_rate"),
        ({"optimizer_params": STEP | {"beta1": 1}}, "optimizer_params.beta1"),
        ({"optimizer_params": STEP | {"beta2": 0.9}}, "optimizer_params.beta2: unknown field"),
    ],
)
def test_a_step_of_another_kind_or_shape_is_refused_by_its_field(
    api: Api, fields: dict[str, object], words: str
) -> None:
    assert words in error_of(api, dimuon_run(api), **fields)


def test_an_adamw_run_refuses_the_hyperparameters_of_others(api: Api) -> None:
    expected = "optimizer_params: this run's optimizer is adamw; send adam_params"
    assert error_of(api, api.run(), optimizer_params=STEP) == expected


@pytest.mark.parametrize(
    ("optimizer", "config", "expected"),
    [
        (True, None, DIMUON),
        (True, DIMUON, DIMUON),
        (False, None, {"type": "adamw"}),
        (False, {"type": "dimuon"}, DIMUON),
    ],
)
def test_a_run_made_of_a_checkpoint_tells_the_optimizer_that_it_got(
    api: Api, optimizer: bool, config: dict[str, object] | None, expected: dict[str, object]
) -> None:
    source = dimuon_run(api)
    with api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, source))
    body = {
        "session_id": api.session(),
        "model_seq_id": 0,
        "path": f"tinker://{source}/weights/first",
        "optimizer": optimizer,
        "optimizer_config": config,
    }
    made = api.ok("load_weights", body)["model_id"]
    assert api.operation(made, 0).state == "accepted"
    assert api.ok("get_info", {"model_id": made})["optimizer_config"] == expected
