"""Every generation of the SDK trains, samples, saves and looks around: JSON and protobuf, both ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.e2e.service import Service

SCRIPT = Path(__file__).with_name("old_sdk_script.py")
VERSIONS = ["0.10.0", "0.14.0", "0.18.2", "0.24.1", "0.25.0", "0.30.4", "0.35.0"]
"""JSON both ways; from 0.18 protobuf results, from 0.25 protobuf requests too. 0.38 is what all other tests use."""


@pytest.fixture(scope="session")
def venvs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the SDKs' environments are; kept from run to run if `TINWORKS_SDK_VENVS` names a folder."""
    kept = os.environ.get("TINWORKS_SDK_VENVS")
    return Path(kept) if kept else tmp_path_factory.mktemp("sdks")


def python_with(version: str, venvs: Path) -> Path:
    """A Python whose `tinker` is of that version. All else it takes from this one's environment, so that nothing but
    the SDK itself is installed: above all no other torch."""
    home = venvs / version
    python = home / "bin" / "python"
    done = home / "installed"
    if not done.exists():
        venv.create(home, clear=True, with_pip=False)
        packages = next((home / "lib").glob("python*")) / "site-packages"
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages)]
        subprocess.run([*install, f"tinker=={version}"], check=True, timeout=150)
        (packages / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
        done.touch()
    return python


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_an_sdk_of_this_version_does_all_that_it_can(version: str, service: Service, venvs: Path) -> None:
    environment = {**os.environ, "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"}
    command = [str(python_with(version, venvs)), str(SCRIPT), service.base_url]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["version"] == version
    assert Path(told["package"]).is_relative_to(venvs)
