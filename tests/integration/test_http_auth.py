"""Tokens and a caller's own key over HTTP: exchanged, used, expired, revoked; with keys and on an open server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import jwt
import pytest

from app.accounts.service import create_key, list_keys, revoke_key
from tests.integration.conftest import Api, running

Serve = Callable[..., AbstractContextManager[Api]]


@pytest.fixture
def serve(configure: Callable[..., None], sqlite_url: str, redis_url: str, tmp_path: Path) -> Serve:
    @contextmanager
    def run(**settings: object) -> Iterator[Api]:
        with running(configure, sqlite_url, redis_url, tmp_path, **settings) as api:
            yield api

    return run


def exchange(api: Api, who: str = "alice") -> str:
    """Exchange a key, and from now on send the token in its place, as `<who>'s token`."""
    token = str(api.ok("auth/token", {}, who=who)["jwt"])
    api.keys[f"{who}'s token"] = token
    return token


def asks_for_an_exchange(challenge: str) -> bool:
    return 'error="invalid_token"' in challenge


def test_a_token_is_as_good_as_its_key(each_api: Api) -> None:
    exchange(each_api)
    by_key, by_token = each_api.session(), each_api.session("alice's token")
    for session_id in (by_key, by_token):
        for who in ("alice", "alice's token"):
            each_api.ok("session_heartbeat", {"session_id": session_id}, who=who)
        assert each_api.post("session_heartbeat", {"session_id": session_id}, who="bob").status_code == 404


@pytest.mark.parametrize("path", ["client/config", "create_session", "retrieve_future", "auth/token"])
def test_a_token_is_taken_wherever_a_key_is(api: Api, path: str) -> None:
    exchange(api)
    assert api.post(path, {}, who="alice's token").status_code == api.post(path, {}).status_code != 401


def test_the_token_of_a_revoked_key_is_refused_at_its_next_request(each_api: Api) -> None:
    exchange(each_api)
    exchange(each_api, "bob")
    assert revoke_key(list_keys("alice")[0][0].id)
    answer = each_api.post("create_session", {}, who="alice's token")
    assert answer.status_code == 401 and asks_for_an_exchange(answer.headers["www-authenticate"])
    assert each_api.post("auth/token", {}).status_code == 401
    each_api.session("bob's token")


def test_an_owners_other_key_keeps_its_token(api: Api) -> None:
    exchange(api)
    api.keys["laptop"] = create_key("alice", "laptop")[1]
    exchange(api, "laptop")
    revoke_key(list_keys("alice")[0][0].id)
    assert api.post("create_session", {}, who="alice's token").status_code == 401
    api.session("laptop's token")


def test_an_expired_token_asks_for_an_exchange_even_while_it_is_remembered(serve: Serve) -> None:
    with serve(token_ttl_s=1.5, key_cache_s=60) as api:
        token = exchange(api)
        api.session("alice's token")
        answers = iter(lambda: api.post("create_session", {}, who="alice's token"), None)
        answer = next(answer for answer in answers if answer.status_code != 200)
        assert answer.status_code == 401 and asks_for_an_exchange(answer.headers["www-authenticate"])
        assert int(answer.headers["content-length"]) > 0
        assert jwt.decode(token, options={"verify_signature": False})["exp"] <= time.time()
        assert exchange(api) != token


def test_a_token_is_never_prolonged_by_itself(api: Api) -> None:
    token = exchange(api)
    assert api.ok("auth/token", {}, who="alice's token")["jwt"] == token


def test_a_key_that_is_wrong_does_not_ask_for_an_exchange(api: Api) -> None:
    api.keys["mallory"] = "tml-mallory"
    answer = api.post("auth/token", {}, who="mallory")
    assert answer.status_code == 401 and not asks_for_an_exchange(answer.headers["www-authenticate"])


def test_clients_are_told_to_exchange_unless_the_settings_say_no(serve: Serve) -> None:
    with serve() as api:
        assert api.ok("client/config", {})["pjwt_auth_enabled"] is True
    with serve(pjwt_auth_enabled=False) as api:
        assert api.ok("client/config", {})["pjwt_auth_enabled"] is False


def test_an_exchange_carries_no_orders(api: Api) -> None:
    assert api.post("auth/token", {"owner": "bob"}).status_code == 422


# -- one's own key


def test_a_key_can_be_looked_at_by_its_bearer(each_api: Api) -> None:
    row, each_api.keys["laptop"] = create_key("alice", "laptop")
    exchange(each_api, "laptop")
    for who in ("laptop", "laptop's token"):
        found = each_api.get("/api/v1/auth/apikey/me", who=who).json()
        assert (found["key_id"], found["name"]) == (row.id, "laptop")
        assert found["details"] == {"org_details": {"name": "alice"}, "user_details": {"email": "alice"}}
        assert each_api.keys["laptop"] not in str(found)


def test_a_bearer_can_revoke_its_own_key_and_no_other(serve: Serve) -> None:
    with serve(key_cache_s=60) as api:
        api.keys["laptop"] = create_key("alice", "laptop")[1]
        exchange(api, "laptop")
        for who in ("alice", "laptop", "laptop's token"):
            api.session(who)
        headers = {"x-api-key": api.keys["laptop"]}
        assert api.client.delete("/api/v1/auth/apikey/me", headers=headers).status_code == 200
        for who in ("laptop", "laptop's token"):
            assert api.post("create_session", {}, who=who).status_code == 401
        assert api.client.delete("/api/v1/auth/apikey/me", headers=headers).status_code == 401
        api.session("alice")


# -- an open server


def test_tokens_work_on_an_open_server(serve: Serve) -> None:
    with serve(auth="open") as api:
        api.keys |= {"ada": "tml-ada", "eve": "tml-eve"}
        exchange(api, "ada")
        exchange(api, "eve")
        session_id = api.session("ada")
        api.ok("session_heartbeat", {"session_id": session_id}, who="ada's token")
        assert api.post("session_heartbeat", {"session_id": session_id}, who="eve's token").status_code == 404
        me = [api.get("/api/v1/auth/apikey/me", who=who).json() for who in ("ada", "ada's token", "eve")]
        assert me[0] == me[1] and me[0]["key_id"] != me[2]["key_id"]
        answer = api.client.delete("/api/v1/auth/apikey/me", headers={"x-api-key": "tml-ada"})
        assert answer.status_code == 400 and "open" in answer.json()["detail"]


def test_a_token_does_not_survive_a_change_of_who_may_use_the_server(serve: Serve) -> None:
    with serve(auth="open") as api:
        token = exchange(api)
    with serve(auth="keys") as api:
        of_a_key = exchange(api)
        api.keys["old"] = token
        assert api.post("create_session", {}, who="old").status_code == 401
    with serve(auth="open") as api:
        api.keys["old"] = of_a_key
        assert api.post("create_session", {}, who="old").status_code == 401
