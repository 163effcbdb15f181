"""Tokens: what they say, and that nobody but this installation makes them."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path

import jwt
import pytest

from app.accounts.secret import derived_key
from app.accounts.tokens import Token, TokenSigner, user_urn
from app.db import Database, get_database
from app.errors import InvalidToken
from app.settings import Settings


@pytest.fixture
def database(configure: Callable[..., None], sqlite_url: str, tmp_path: Path) -> Database:
    configure(DATABASE_URL=sqlite_url, TINWORKS_DATA_DIR=tmp_path)
    return get_database()


def signer(database: Database, **settings: object) -> TokenSigner:
    return TokenSigner(database, Settings(**settings))


def sign(database: Database, **settings: object) -> str:
    return signer(database, **settings).sign(owner_id="o1", owner_name="ada", key_id=7)


def unverified(token: str) -> dict[str, object]:
    claims: dict[str, object] = jwt.decode(token, options={"verify_signature": False})
    return claims


def forged(header: dict[str, object], claims: dict[str, object], signature: bytes = b"") -> str:
    parts = [json.dumps(header).encode(), json.dumps(claims).encode(), signature]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


def test_a_token_carries_what_clients_show_of_its_bearer(database: Database) -> None:
    claims = unverified(sign(database, token_ttl_s=60))
    assert (claims["sub"], claims["org_id"], claims["email"]) == (user_urn("o1"), "o1", "ada")
    assert claims["exp"] - claims["iat"] == pytest.approx(60)  # type: ignore[operator]


def test_a_token_is_read_back(database: Database) -> None:
    own = signer(database, token_ttl_s=60)
    read = own.read(own.sign(owner_id="o1", owner_name="ada", key_id=7))
    assert read == Token("o1", 7, read.expires_at)
    assert 50 < read.expires_at - time.time() <= 60


def test_every_process_reads_the_tokens_of_the_others(database: Database) -> None:
    assert signer(database).read(sign(database)).owner_id == "o1"
    assert signer(database, secret_key="s" * 32).read(sign(database, secret_key="s" * 32)).owner_id == "o1"


def test_a_token_of_another_secret_is_refused(database: Database) -> None:
    with pytest.raises(InvalidToken, match="not signed by this server"):
        signer(database, secret_key="t" * 32).read(sign(database))


def test_an_expired_token_is_refused(database: Database) -> None:
    token = sign(database, token_ttl_s=0.001)
    time.sleep(0.01)
    with pytest.raises(InvalidToken, match="expired"):
        signer(database).read(token)


def test_the_key_of_tokens_is_no_key_of_anything_else(database: Database) -> None:
    settings = Settings()
    keys = {derived_key(database, settings, purpose) for purpose in ("access tokens", "download links")}
    assert len(keys) == 2
    assert derived_key(database, settings, "access tokens") in keys


@pytest.mark.parametrize("algorithm", ["none", "None", "NONE", "", "RS256", "HS384", "ES256"])
def test_the_header_does_not_choose_how_a_token_is_checked(database: Database, algorithm: str) -> None:
    claims = unverified(sign(database))
    with pytest.raises(InvalidToken):
        signer(database).read(forged({"alg": algorithm, "typ": "JWT"}, claims))


def test_another_algorithm_with_the_right_key_is_refused(database: Database) -> None:
    key = derived_key(database, Settings(), "access tokens")
    token = jwt.encode(unverified(sign(database)), key + key, algorithm="HS512")
    with pytest.raises(InvalidToken):
        signer(database).read(token)


def test_an_altered_token_is_refused(database: Database) -> None:
    head, body, signature = sign(database).split(".")
    other = unverified(f"{head}.{body}.{signature}") | {"org_id": "o2"}
    altered = base64.urlsafe_b64encode(json.dumps(other).encode()).rstrip(b"=").decode()
    with pytest.raises(InvalidToken):
        signer(database).read(f"{head}.{altered}.{signature}")


@pytest.mark.parametrize("missing", ["exp", "iat", "iss", "sub", "org_id"])
def test_a_token_must_say_everything(database: Database, missing: str) -> None:
    claims = unverified(sign(database))
    del claims[missing]
    token = jwt.encode(claims, derived_key(database, Settings(), "access tokens"), algorithm="HS256")
    with pytest.raises(InvalidToken):
        signer(database).read(token)


@pytest.mark.parametrize("rubbish", ["eyJ", "eyJ.eyJ.eyJ", "eyJhbGciOiJIUzI1NiJ9..", "eyJ" + "x" * 4000])
def test_rubbish_is_refused(database: Database, rubbish: str) -> None:
    with pytest.raises(InvalidToken):
        signer(database).read(rubbish)
