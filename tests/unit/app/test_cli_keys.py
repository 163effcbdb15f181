"""`tinworks keys`: a key is shown once, listed by its beginning, and gone when revoked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from app.cli import app
from app.db import get_database
from app.settings import get_settings


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A data folder that settings of this process are not yet about."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("DATABASE_URL", f"sqlite:///{tmp_path / 'tinworks.db'}")
    monkeypatch.setenv("TINWORKS_DATA_DIR", str(tmp_path))
    get_settings.cache_clear()
    get_database.cache_clear()
    yield tmp_path
    get_database().dispose()
    get_settings.cache_clear()
    get_database.cache_clear()


def tinworks(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_a_key_is_alone_on_standard_output_and_never_listed(data_dir: Path) -> None:
    assert tinworks("migrate").exit_code == 0
    made = tinworks("keys", "create", "alice", "--name", "laptop")
    secret = made.stdout.strip()
    assert made.exit_code == 0
    assert secret.startswith("tml-")
    assert secret.split() == [secret]
    listed = tinworks("keys", "list").output
    assert secret not in listed
    assert all(part in listed for part in ("alice", "laptop", secret[:8]))
    assert secret not in (data_dir / "tinworks.db").read_bytes().decode("latin-1")


def test_a_key_is_revoked_once(data_dir: Path) -> None:
    tinworks("migrate")
    tinworks("keys", "create", "alice")
    assert tinworks("keys", "revoke", "1").exit_code == 0
    again = tinworks("keys", "revoke", "1")
    assert again.exit_code == 1
    assert "no key 1" in again.stderr


def test_only_the_keys_of_one_owner_are_listed(data_dir: Path) -> None:
    tinworks("migrate")
    tinworks("keys", "create", "alice")
    tinworks("keys", "create", "bob")
    listed = tinworks("keys", "list", "--owner", "bob").output
    assert "bob" in listed
    assert "alice" not in listed


def test_a_database_without_tables_is_answered_with_what_to_do(data_dir: Path) -> None:
    result = tinworks("keys", "list")
    assert result.exit_code == 1
    assert "tinworks migrate" in result.stderr


def test_a_setting_that_is_not_valid_is_named(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "mysql://x")
    result = tinworks("migrate")
    monkeypatch.undo()
    assert result.exit_code == 1
    assert "DATABASE_URL must start with" in result.stderr
