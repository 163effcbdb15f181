"""Settings come from the environment; one that cannot work is named."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from app.settings import Settings


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_every_spelling_of_postgres_reaches_the_driver_that_we_install(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setenv("DATABASE_URL", f"{scheme}://me:secret@db:5432/tinworks?sslmode=require")
    assert Settings().database_url == "postgresql+psycopg://me:secret@db:5432/tinworks?sslmode=require"


def test_sqlite_is_left_as_it_is() -> None:
    assert Settings(database_url="sqlite:///x.db").database_url == "sqlite:///x.db"


def test_platforms_names_and_our_own_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"REDIS_URL": "redis://r:1/2", "PORT": "9", "TINWORKS_AUTH": "open"}.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert (settings.redis_url, settings.port, settings.auth) == ("redis://r:1/2", 9, "open")


@pytest.mark.parametrize(("own", "read"), [("", "required"), ("none", "none")])
def test_what_checks_certificates_of_redis_is_in_its_url(monkeypatch: pytest.MonkeyPatch, own: str, read: str) -> None:
    monkeypatch.setenv("REDIS_URL", "rediss://:secret@r:1/2")
    if own:
        monkeypatch.setenv("TINWORKS_REDIS_CERT_REQS", own)
    assert Settings().redis_url == f"rediss://:secret@r:1/2?ssl_cert_reqs={read}"


WRONG = {
    "DATABASE_URL": ("mysql://x", "DATABASE_URL must start with"),
    "REDIS_URL": ("http://x", "REDIS_URL must start with"),
    "PORT": ("eighty", "PORT"),
    "TINWORKS_AUTH": ("maybe", "auth"),
    "TINWORKS_SECRET_KEY": ("short", "TINWORKS_SECRET_KEY must have at least 32 characters"),
    "TINWORKS_POLL_HOLD_S": ("31", "poll_hold_s"),
    "TINWORKS_LEASE_S": ("0", "lease_s"),
    "TINWORKS_MAX_REQUEST_BYTES": ("10", "max_request_bytes"),
    "TINWORKS_PUBLIC_URL": ("example.org", "TINWORKS_PUBLIC_URL must start with http:// or https://"),
    "TINWORKS_DOWNLOAD_URL_TTL_S": ("5", "download_url_ttl_s"),
    "TINWORKS_LOG_LEVEL": ("loud", "log_level"),
}


@pytest.mark.parametrize("variable", WRONG)
def test_a_value_that_cannot_work_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    value, words = WRONG[variable]
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValidationError, match=words):
        Settings()


@pytest.mark.parametrize(
    ("gpus", "ranks", "local"), [("", 0, 1), ("3", 0, 1), ("0, 1,2", 0, 3), ("0,1", 1, 1), ("", 4, 4)]
)
def test_a_train_worker_has_a_rank_for_each_device(gpus: str, ranks: int, local: int) -> None:
    assert Settings(gpus=gpus, train_ranks=ranks).local_ranks == local
