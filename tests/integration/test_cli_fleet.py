"""`tinworks runs` and `tinworks workers`: what runs, what waits, and why."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import update
from typer.testing import CliRunner

from app.cli import app
from app.db import database_clock
from app.fleet.models import Worker
from app.runs.models import Run
from tests.integration.conftest import Api


def told(*arguments: str) -> Any:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def run_of(model_id: str) -> dict[str, Any]:
    (found,) = [run for run in told("runs", "--all") if run["id"] == model_id]
    return dict(found)


def step(api: Api, model_id: str, seq_id: int, who: str = "alice") -> None:
    body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 1e-3}}
    api.ok("optim_step", body, who=who)


def held_by(api: Api, model_id: str, worker_id: str) -> None:
    with api.database.write() as session:
        session.get_one(Run, model_id).worker_id = worker_id


def worker(api: Api) -> str:
    with api.database.read() as session:
        return session.query(Worker).one().id


def test_an_idle_run_is_listed_only_when_all_are(each_api: Api) -> None:
    api = each_api
    model_id = api.run()
    assert told("runs") == []
    assert run_of(model_id)["state"] == "idle"


def test_a_run_with_work_and_a_worker_trains(each_api: Api) -> None:
    api = each_api
    model_id = api.run()
    step(api, model_id, 1)
    held_by(api, model_id, worker(api))
    (run,) = told("runs")
    assert (run["id"], run["state"], run["operations"], run["owner"]) == (model_id, "training", 1, "alice")
    assert run["age_s"] > 0


def test_a_run_that_lacks_a_sequence_id_says_which(api: Api) -> None:
    model_id = api.run()
    step(api, model_id, 2)
    run = run_of(model_id)
    assert (run["state"], run["why"]) == ("waiting", "sequence id 1 has not arrived")


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"last_seen": database_clock() - 100}, "no train worker of pool tiny is alive"),
        ({"draining": True}, "all train workers of pool tiny are draining"),
        ({"resident_runs": 4}, "all 4 slots of pool tiny are taken by runs with work"),
        ({"resident_runs": 0}, "is about to be taken"),
    ],
)
def test_a_run_that_nobody_holds_says_why(api: Api, values: dict[str, Any], why: str) -> None:
    model_id = api.run()
    step(api, model_id, 1)
    with api.database.write() as session:
        session.execute(update(Worker).values(**values))
    run = run_of(model_id)
    assert (run["state"], run["why"]) == ("waiting", why)


def test_a_run_of_a_dead_worker_waits_for_its_lease(api: Api) -> None:
    model_id = api.run()
    step(api, model_id, 1)
    held_by(api, model_id, worker(api))
    with api.database.write() as session:
        session.execute(update(Worker).values(last_seen=database_clock() - 100))
    assert "is silent" in run_of(model_id)["why"]


def test_runs_of_one_tenant(api: Api) -> None:
    mine, theirs = api.run(), api.run(who="bob")
    step(api, mine, 1)
    step(api, theirs, 1, who="bob")
    assert [run["id"] for run in told("runs", "--owner", "bob")] == [theirs]
    assert {run["id"] for run in told("runs")} == {mine, theirs}


def test_a_failed_and_an_unloaded_run_are_told_apart(api: Api) -> None:
    failed, unloaded = api.run(), api.run()
    with api.database.write() as session:
        session.get_one(Run, failed).failed = True
    api.ok("unload_model", {"model_id": unloaded})
    assert (run_of(failed)["state"], run_of(unloaded)["state"]) == ("failed", "unloaded")


def test_workers_are_listed_with_what_they_hold(each_api: Api) -> None:
    (seen,) = told("workers")
    assert (seen["pool"], seen["roles"], seen["state"], seen["slots"]) == ("tiny", ["train", "sample"], "ready", 4)
    assert told("workers", "--pool", "other") == []


def test_a_worker_is_drained_and_undrained_by_its_name(api: Api) -> None:
    name = worker(api)
    assert CliRunner().invoke(app, ["workers", "drain", name[:9]]).exit_code == 0
    assert told("workers")[0]["state"] == "draining"
    assert CliRunner().invoke(app, ["workers", "undrain", name]).exit_code == 0
    assert told("workers")[0]["state"] == "ready"


def test_an_unknown_worker_is_an_error(api: Api) -> None:
    result = CliRunner().invoke(app, ["workers", "drain", "nobody"])
    assert result.exit_code == 1 and "There is no worker 'nobody'" in result.stderr


def test_tables_are_for_people(api: Api) -> None:
    model_id = api.run()
    step(api, model_id, 1)
    runs, workers = CliRunner().invoke(app, ["runs"]), CliRunner().invoke(app, ["workers"])
    assert model_id[:8] in runs.stdout and "alice" in runs.stdout
    assert worker(api) in workers.stdout
