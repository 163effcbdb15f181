"""Download links: what they lead to, for how long, and that nobody but this installation makes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import jwt
import pytest

from app.accounts.secret import derived_key
from app.accounts.tokens import TokenSigner
from app.checkpoints.links import LinkSigner, Target
from app.db import Database, get_database
from app.errors import Forbidden
from app.settings import Settings

TARGET = Target("a" * 32, "adapter_config.json", "adapter_config.json")


@pytest.fixture
def database(configure: Callable[..., None], sqlite_url: str, tmp_path: Path) -> Database:
    configure(DATABASE_URL=sqlite_url, TINWORKS_DATA_DIR=tmp_path)
    return get_database()


def signer(database: Database, **settings: object) -> LinkSigner:
    return LinkSigner(database, Settings(**settings))


def later() -> int:
    return int(time.time()) + 60


@pytest.mark.parametrize("target", [TARGET, Target("b" * 32, None, "first.tar")])
def test_a_link_is_read_by_every_process_of_the_installation(database: Database, target: Target) -> None:
    token = signer(database).sign(target, expires_at=later())
    link = signer(database).read(token)
    assert link.target == target
    assert link.signed_at == pytest.approx(time.time(), abs=5)


def test_a_link_expires(database: Database) -> None:
    token = signer(database).sign(TARGET, expires_at=int(time.time()) - 1)
    with pytest.raises(Forbidden, match="expired"):
        signer(database).read(token)


def test_an_altered_link_is_refused(database: Database) -> None:
    token = signer(database).sign(TARGET, expires_at=later())
    head, body, signature = token.split(".")
    other = signer(database).sign(Target("c" * 32, None, "x"), expires_at=later()).split(".")[1]
    swapped = signature[:5] + ("A" if signature[5] != "A" else "B") + signature[6:]
    for forged in (f"{head}.{other}.{signature}", f"{head}.{body}.{swapped}", f"{head}.{body}.", body, "", "a.b.c"):
        with pytest.raises(Forbidden, match="not signed by this server"):
            signer(database).read(forged)


def test_a_link_of_another_installation_or_of_no_signature_is_refused(database: Database) -> None:
    claims = {"iat": 0, "exp": later(), "snapshot": "a" * 32, "file": "", "name": "x"}
    foreign = signer(database, secret_key="s" * 32).sign(TARGET, expires_at=later())
    for forged in (foreign, jwt.encode(claims, None, algorithm="none")):
        with pytest.raises(Forbidden):
            signer(database).read(forged)


def test_an_access_token_is_no_link_and_a_link_no_access_token(database: Database) -> None:
    access = TokenSigner(database, Settings()).sign(owner_id="o", owner_name="ada", key_id=1)
    with pytest.raises(Forbidden):
        signer(database).read(access)
    keys = {derived_key(database, Settings(), purpose) for purpose in ("access tokens", "download links")}
    assert len(keys) == 2


@pytest.mark.parametrize("lacking", ["exp", "snapshot", "file", "name"])
def test_a_link_that_says_too_little_is_refused(database: Database, lacking: str) -> None:
    claims = {"iat": 0, "exp": later(), "snapshot": "a" * 32, "file": "", "name": "x"}
    del claims[lacking]
    key = derived_key(database, Settings(), "download links")
    with pytest.raises(Forbidden):
        signer(database).read(jwt.encode(claims, key, algorithm="HS256"))
