"""Weights of another account, with its key or token: loaded in place, as a new run, and copied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from app.accounts.service import create_key, list_keys, revoke_key
from app.runs.models import Run
from tests.factories import add_checkpoint
from tests.integration.conftest import Api, running

WRONG = ["nonsense", "", "tml-unknown", "eyJhbGciOiJub25lIn0.e30.", "tml-" + "x" * 600]
HEADER = "x_tinker_weights_access_token"


def make(api: Api, who: str = "bob") -> str:
    """A private checkpoint of `who`; returns its path."""
    model_id = api.run(who)
    with api.database.write() as session:
        add_checkpoint(session, session.get_one(Run, model_id))
    return f"tinker://{model_id}/weights/first"


def load(api: Api, path: str, token: object, seq_id: int = 1, model_id: str | None = None) -> tuple[str, str]:
    """Load into a run of alice's; returns the operation's state and error."""
    model_id = model_id or api.run()
    body = {"model_id": model_id, "seq_id": seq_id, "path": path, "optimizer": True, "weights_access_token": token}
    api.ok("load_weights", body)
    operation = api.operation(model_id, seq_id)
    return operation.state, operation.error or ""


def create(api: Api, path: str, token: object) -> tuple[str, str]:
    """Make a run of alice's of a checkpoint; returns its creation's state and error."""
    body = {"session_id": api.session(), "model_seq_id": 0, "path": path, "optimizer": True}
    model_id = api.ok("load_weights", body | {"weights_access_token": token})["model_id"]
    operation = api.operation(model_id, 0)
    return operation.state, operation.error or ""


def token_of(api: Api, who: str) -> str:
    return str(api.ok("auth/token", who=who)["jwt"])


@pytest.mark.parametrize("ask", [load, create])
def test_the_owners_key_or_token_opens_its_checkpoint_and_nothing_else(
    each_api: Api, ask: Callable[[Api, str, object], tuple[str, str]]
) -> None:
    path = make(each_api)
    for token in (each_api.keys["bob"], token_of(each_api, "bob")):
        assert ask(each_api, path, token) == ("accepted", "")
    for token in (each_api.keys["alice"], token_of(each_api, "alice")):
        state, error = ask(each_api, path, token)
        assert state == "failed" and "weights_access_token" in error and "no checkpoint" in error
    state, error = ask(each_api, path, None)
    assert (state, error) == ("failed", f"path: there is no checkpoint {path!r}")


@pytest.mark.parametrize("ask", [load, create])
@pytest.mark.parametrize("token", WRONG)
def test_a_wrong_token_is_a_failed_future_that_names_it_and_does_not_repeat_it(
    api: Api, ask: Callable[[Api, str, object], tuple[str, str]], token: str
) -> None:
    state, error = ask(api, make(api), token)
    assert state == "failed"
    assert error.startswith("weights_access_token: ")
    assert not token or token not in error


def test_a_revoked_key_opens_nothing(api: Api) -> None:
    path, (row, secret) = make(api), create_key("bob", "lent")
    assert load(api, path, secret)[0] == "accepted"
    revoke_key(row.id)
    assert load(api, path, secret)[1].startswith("weights_access_token: ")


def test_a_repeat_with_a_renewed_token_is_the_same_request(api: Api) -> None:
    path, model_id = make(api), api.run()
    for token in (api.keys["bob"], token_of(api, "bob")):
        assert load(api, path, token, model_id=model_id) == ("accepted", "")


def test_a_copy_is_made_with_the_owners_key(each_api: Api) -> None:
    body = {"source_path": make(each_api), "destination_project_id": "p"}
    assert each_api.post("copy_weights", body).status_code == 404
    answer = each_api.post("copy_weights", body, **{HEADER: each_api.keys["bob"]})
    assert answer.status_code == 200, answer.text
    model_id = answer.json()["tinker_path"].split("/")[2]
    assert each_api.seen(f"training_runs/{model_id}")["model_owner"] == "alice"
    assert each_api.send("GET", f"training_runs/{model_id}", who="bob").status_code == 404


@pytest.mark.parametrize("token", [token for token in WRONG if token])
def test_a_copy_with_a_wrong_token_is_refused_by_name(api: Api, token: str) -> None:
    body = {"source_path": make(api), "destination_project_id": "p"}
    answer = api.post("copy_weights", body, **{HEADER: token})
    assert answer.status_code == 400
    assert answer.json()["detail"].startswith("weights_access_token: ")
    others = api.post("copy_weights", body, **{HEADER: api.keys["alice"]})
    assert others.status_code == 404 and "weights_access_token" in others.json()["detail"]


def test_a_token_is_neither_stored_nor_logged(
    configure: Callable[..., None],
    sqlite_url: str,
    redis_url: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path, log_level="debug") as api:
        path, (_, key) = make(api), create_key("bob", "lent")
        secrets = [key, token_of(api, "bob"), "tml-wrong-but-secret"]
        for secret in secrets:
            load(api, path, secret)
            create(api, path, secret)
            api.post("copy_weights", {"source_path": path, "destination_project_id": "p"}, **{HEADER: secret})
        assert list_keys("bob")
    stored = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    logged = "".join(capfd.readouterr())
    assert path.encode() in stored
    for secret in secrets:
        assert secret.encode() not in stored
        assert secret not in logged


def test_on_an_open_server_each_key_is_an_account(
    configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path
) -> None:
    with running(configure, sqlite_url, redis_url, tmp_path, auth="open") as api:
        path = make(api)
        assert load(api, path, api.keys["bob"])[0] == "accepted"
        state, error = load(api, path, "tml-of-nobody-yet")
        assert state == "failed" and "weights_access_token" in error
