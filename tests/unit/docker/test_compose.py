"""`docker/compose.yaml` and `app.json` say what the code understands."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from typing import Any

import pytest
import yaml
from pydantic import AliasChoices

from app.settings import Settings
from tests.unit.docker.dockerfile import ROOT

THEIRS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "AWS_REGION"}
"""Read by libraries that we use."""
OURS = ("web", "beat", "release", "train", "sample")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())
    return loaded


def variables() -> set[str]:
    """Every environment variable that is a setting."""
    names: set[str] = set()
    for name, field in Settings.model_fields.items():
        alias = field.validation_alias
        names |= set(map(str, alias.choices)) if isinstance(alias, AliasChoices) else {f"TINWORKS_{name.upper()}"}
    return names


def procfile() -> dict[str, list[str]]:
    lines = (line.split(": ", 1) for line in (ROOT / "Procfile").read_text().splitlines())
    return {role: shlex.split(command) for role, command in lines}


def test_every_role_of_the_procfile_is_a_service(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(procfile()) <= services.keys()
    for role in ("release", "beat"):
        assert services[role]["command"] == procfile()[role]
    for role in ("web", "train", "sample"):
        assert "command" not in services[role], "the image's own"
        assert services[role]["build"]["dockerfile"] == f"docker/{role}.Dockerfile"
        assert (ROOT / services[role]["build"]["dockerfile"]).exists()


@pytest.mark.parametrize("role", OURS)
def test_services_set_only_settings_that_exist(compose: dict[str, Any], role: str) -> None:
    assert set(compose["services"][role]["environment"]) <= variables() | THEIRS


def test_the_settings_are_valid(compose: dict[str, Any]) -> None:
    example = {"POSTGRES_PASSWORD": "p", "AWS_SECRET_ACCESS_KEY": "s", "TINWORKS_BASE_MODEL": "org/m"}
    values = {}
    for name, value in compose["services"]["train"]["environment"].items():
        filled = re.sub(r"\$\{(\w+):[-?]([^}]*)\}", lambda m: example.get(m[1], m[2]), value)
        values[name.removeprefix("TINWORKS_").lower()] = filled
    settings = Settings(**{name: value for name, value in values.items() if name in Settings.model_fields})
    assert settings.database_url == "postgresql+psycopg://tinworks:p@postgres:5432/tinworks"
    assert settings.s3_bucket == "tinworks"


def test_what_a_service_waits_for_exists(compose: dict[str, Any]) -> None:
    services, volumes = compose["services"], set(compose["volumes"])
    for service in services.values():
        assert set(service.get("depends_on", ())) <= services.keys()
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in volumes or source.startswith((".", "$")), volume
    for condition, name in [("service_healthy", "redis"), ("service_completed_successfully", "release")]:
        assert services["web"]["depends_on"][name]["condition"] == condition
    for service in services.values():
        depends = service.get("depends_on", {})
        healthy = [name for name in depends if isinstance(depends, dict)]
        for name in healthy:
            if depends[name]["condition"] == "service_healthy":
                assert "healthcheck" in services[name]


def test_redis_keeps_what_it_holds(compose: dict[str, Any]) -> None:
    command = compose["services"]["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert (options["--appendonly"], options["--maxmemory-policy"]) == ("yes", "noeviction")


def test_metrics_and_flower_are_not_started_by_themselves_nor_shown_to_the_world(compose: dict[str, Any]) -> None:
    for name in ("flower", "prometheus", "grafana"):
        service = compose["services"][name]
        assert service["profiles"]
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    port = compose["services"]["web"]["environment"]["TINWORKS_METRICS_PORT"]
    assert not [published for published in compose["services"]["web"]["ports"] if published.endswith(f":{port}")]
    scraped = yaml.safe_load((ROOT / "docker" / "prometheus.yaml").read_text())["scrape_configs"]
    assert scraped[0]["dns_sd_configs"][0] == {"names": ["web"], "type": "A", "port": int(port)}


def test_secrets_have_no_default(compose: dict[str, Any]) -> None:
    text = (ROOT / "docker" / "compose.yaml").read_text()
    assert not re.findall(r"\$\{\w*(?:PASSWORD|SECRET_ACCESS_KEY):-", text)
    given = dict(
        line.split("=", 1)
        for line in (ROOT / "docker" / "env.example").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert set(re.findall(r"\$\{(\w+):\?", text)) <= given.keys()


def test_compose_itself_understands_it() -> None:
    command = next((c for c in (["docker-compose"], ["docker", "compose"]) if _runs([*c, "version"])), None)
    if command is None:
        pytest.skip("docker compose is not installed")
    given = {"POSTGRES_PASSWORD": "p", "AWS_SECRET_ACCESS_KEY": "s", "TINWORKS_BASE_MODEL": "org/m"}
    answer = subprocess.run(
        [*command, "-f", "docker/compose.yaml", "config", "-q"],
        cwd=ROOT,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr


def _runs(command: list[str]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_app_json_names_roles_and_settings_that_exist() -> None:
    app = json.loads((ROOT / "app.json").read_text())
    assert app["formation"].keys() == procfile().keys() - {"release"}
    assert set(app["env"]) <= variables() | THEIRS
    assert app["env"]["TINWORKS_REDIS_CERT_REQS"]["value"] == "none"
