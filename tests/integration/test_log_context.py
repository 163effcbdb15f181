"""Lines of the log say which request and which run they are about, in web and in workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from sqlalchemy.exc import OperationalError

from app.runs import service
from app.telemetry.context import add_ids
from tests.integration.conftest import Api, running
from tests.unit.workers.train.train_lab import Lab, break_passes


@pytest.fixture
def lines(capfd: pytest.CaptureFixture[str]) -> Callable[[str], list[dict[str, object]]]:
    """The lines of an event that were logged since the last look."""

    def read(event: str) -> list[dict[str, object]]:
        found = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
        return [line for line in found if line["event"] == event]

    return read


def test_an_outage_in_a_thread_is_logged_with_the_request(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of a request in a thread is known to who logs its failure on the event loop."""
    model_id = api.run()

    def away(*args: object, **options: object) -> None:
        raise OperationalError("SELECT", {}, Exception("away"))

    monkeypatch.setattr(service, "require_live_run", away)
    seen: list[dict[str, object]] = []

    def keep(logger: object, method: str, event: dict[str, object]) -> dict[str, object]:
        seen.append(dict(add_ids(logger, method, event)))
        raise structlog.DropEvent

    monkeypatch.setattr(
        "app.main.log", structlog.wrap_logger(None, processors=[keep], wrapper_class=structlog.BoundLogger)
    )
    answer = api.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
    assert answer.status_code == 503
    (line,) = [line for line in seen if line["event"] == "database_outage"]
    assert (line["model_id"], line["request_id"]) == (model_id, f"{model_id}:1")


def test_two_requests_do_not_share_their_ids(
    configure: Callable[..., None],
    sqlite_url: str,
    redis_url: str,
    tmp_path: Path,
    lines: Callable[[str], list[dict[str, object]]],
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path, log_level="debug") as api:
        first, second = api.run(), api.run()
        for model_id in (first, second):
            api.ok("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {"learning_rate": 1e-3}})
        told = [line["request_id"] for line in lines("submitted") if line["kind"] == "optim_step"]
        assert told == [f"{first}:1", f"{second}:1"]


def test_a_pass_that_failed_names_its_requests(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, client = lab.worker(), lab.client()
    lab.work(loop)
    break_passes(monkeypatch, client, RuntimeError("out of order"))
    number = client.forward_backward(1)
    loop.cycle()
    (line,) = [line for line in lab.logs if line["event"] == "pass_failed"]
    assert line["request_ids"] == [f"{client.model_id}:{number}"]
